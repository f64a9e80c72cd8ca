"""The files that are mutated, and the tests that concern each, the likeliest to fail first."""

from __future__ import annotations

PLAN = [
    "exec_plan_order_test",
    "exec_plan_test",
    "exec_wide_folds_test",
    "exec_traffic_test",
    "exec_collectives_test",
    "exec_feedback_test",
]
CONTROL = [
    "exec_control_plane_test",
    "exec_control_calls_test",
    "exec_status_test",
    "exec_faults_test",
    "exec_stop_test",
    "exec_agreement_test",
]
SHARD = [
    "serve_shard_test",
    "serve_requests_test",
    "serve_server_test",
    "serve_client_test",
    "serve_vectors_test",
]

PROGRAMS = {
    "csrc/gradwire/codec/feedback/feedback.cc": [
        "codec_feedback_test",
        "codec_residuals_test",
        "exec_feedback_test",
        "exec_transaction_test",
    ],
    "csrc/gradwire/codec/feedback/residuals.cc": [
        "codec_residuals_test",
        "codec_feedback_test",
        "exec_narrow_feedback_test",
    ],
    "csrc/gradwire/exec/control/control_plane.cc": CONTROL,
    "csrc/gradwire/exec/control/history.cc": ["exec_history_test", *CONTROL],
    "csrc/gradwire/exec/control/mismatch_report.cc": ["exec_mismatch_report_test", *CONTROL[1:4]],
    "csrc/gradwire/exec/plan/buffer_map.cc": [*PLAN[3:], "exec_gather_test"],
    "csrc/gradwire/exec/plan/chunk_layout.cc": ["exec_chunk_layout_test", *PLAN[:2], *PLAN[4:]],
    "csrc/gradwire/exec/plan/plan.cc": PLAN,
    "csrc/gradwire/exec/plan/segmentation.cc": PLAN,
    "csrc/gradwire/exec/plan/wide_folds.cc": [
        "exec_wide_folds_test",
        "exec_plan_order_test",
        *PLAN[4:],
    ],
    "csrc/gradwire/schedule/hierarchical.cc": ["schedule_hierarchical_test"],
    "csrc/gradwire/serve/shard/shard.cc": SHARD,
    "csrc/gradwire/serve/shard/snapshot.cc": SHARD[:1],
    "csrc/gradwire/serve/shard/update_rule.cc": ["serve_rules_test", *SHARD[:1]],
}
