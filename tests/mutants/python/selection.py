"""The files that are mutated, which tests concern each, and mutants that no test can notice."""

from __future__ import annotations

_PLANNER = (
    *("planner/test_advise_rules.py", "planner/test_exchanges.py", "planner/test_judgements.py"),
    *("planner/test_volumes.py", "planner/test_steps.py"),
    "planner/test_tables.py",
    *("planner/test_advise.py", "--deselect=planner/test_advise.py::test_a_module_is_walked"),
)
_CALLS = tuple(
    f"calls/test_{each}.py" for each in ("arguments", "async", "several_arrays", "repeated_calls")
)
_ELASTIC = tuple(
    f"torch_elastic/test_elastic_{each}.py"
    for each in ("session", "share", "commits", "errors", "random", "rates", "training")
)
_FEEDBACK = (
    "torch_hook/test_scales.py",
    *(f"torch_hook/test_torch_{each}.py" for each in ("feedback", "amp", "saved")),
)
_HOOK = tuple(f"torch_hook/test_torch_{each}.py" for each in ("hook", "failures", "features"))

_COMPRESSED = "torch_backend/test_compressed_groups.py"
_STAGING = "torch_backend/test_staging.py"


def _backend(*names: str) -> tuple[str, ...]:
    return tuple(f"torch_backend/test_backend_{each}.py" for each in names)


# The first that a path in python/gradwire begins with decides. Tests are in tests/python.
TESTS: dict[str, tuple[str, ...]] = {
    "_calls/objects.py": ("calls/test_whole_call_timeouts.py", "calls/test_objects.py"),
    "_calls/variable.py": ("calls/test_whole_call_timeouts.py", "calls/test_variable_sizes.py"),
    "_calls/python_codec.py": ("compression/test_python_codecs.py",),
    "_calls/requests.py": (
        *("compression/test_codec_payloads.py", "compression/test_feedback.py"),
        *("compression/test_python_codecs.py", "calls/test_scaling.py"),
        *_CALLS,
    ),
    "_calls/collectives.py": _CALLS,
    "_calls/on_cpu.py": _CALLS,
    "_bootstrap/connect.py": tuple(
        f"joining/test_{each}.py"
        for each in ("connecting", "rendezvous", "interfaces", "rdma", "shortages", "relay")
    ),
    "_bootstrap/acceptor.py": ("joining/test_connecting.py",),
    "_bootstrap/endpoints.py": tuple(
        f"joining/test_{each}.py" for each in ("connecting", "interfaces", "relay")
    ),
    "_bootstrap/relay.py": ("joining/test_relay.py",),
    "_bootstrap/shared_port.py": ("joining/test_shared_port.py",),
    "_bootstrap/store": ("joining/test_store.py", "joining/test_store_addresses.py"),
    "_bootstrap/authenticator.py": (
        "joining/test_handshake.py",
        "joining/test_shared_port.py",
        "elastic/test_silent_joiners.py",
    ),
    "_bootstrap/join_listener.py": (
        *("elastic/test_join_listener_rules.py", "elastic/test_join_listener.py"),
        "elastic/test_silent_joiners.py",
        *("elastic/test_job_end.py", "joining/test_hidden_secrets.py"),
    ),
    "torch/_downpour": (
        "serve/test_downpour_rules.py",
        "serve/test_downpour.py",
        "serve/test_downpour_codecs.py",
    ),
    "torch/elastic/averaging.py": ("torch_elastic/test_elastic_averager.py", *_ELASTIC),
    "torch/elastic/session.py": _ELASTIC,
    "torch/elastic/members.py": ("torch_elastic/test_elastic_decisions.py",),
    "torch/exchange/gradient_scale.py": _FEEDBACK,
    "torch/ddp/model_hooks.py": (
        "torch_hook/test_guard_rules.py",
        "torch_hook/test_torch_guard.py",
    ),
    "torch/ddp/momentum.py": ("torch_hook/test_velocities.py", "torch_hook/test_torch_momentum.py"),
    "torch/ddp/training_state.py": ("torch_hook/test_repacking.py", *_FEEDBACK, *_HOOK),
    "torch/exchange/residual_state.py": _FEEDBACK,
    "torch/exchange/rules.py": (
        *("torch_hook/test_torch_rules.py", "torch_hook/test_torch_defaults.py"),
        *("torch_hook/test_scales.py", *_HOOK),
    ),
    "torch/ddp/hook.py": ("torch_hook/test_hook_steps.py", *_HOOK),
    "torch/backend/collectives.py": (_STAGING, *_backend("collectives", "views"), _COMPRESSED),
    "torch/backend/mailbox.py": ("torch_backend/test_mailbox.py", *_backend("messages", "blame")),
    "torch/backend/operations.py": (
        "torch_backend/test_operations.py",
        *_backend("works", "called_from_cpp", "messages", "failures"),
    ),
    "torch/backend/point_to_point.py": _backend("messages", "views"),
    "torch/backend/staging.py": (_STAGING, *_backend("views", "collectives"), _COMPRESSED),
    "lab/planner/advice.py": _PLANNER,
    "lab/planner/exchanges.py": _PLANNER,
    "lab/planner/judgement.py": _PLANNER,
    "lab/planner/steps.py": _PLANNER,
    "lab/planner/volumes.py": _PLANNER,
}

# By file, and the lines that differ: the old and the new ones.
EQUIVALENT: dict[tuple[str, str], str] = {
    ("_bootstrap/store_server.py", "self._is_over = True pass"): (
        "whoever asks later waits, and the next turn refuses all that wait, with the same answer"
    ),
    (
        "_bootstrap/store_server.py",
        "os.eventfd_write(self._wake, 1) os.eventfd_write(self._wake, 2)",
    ): "any number makes the eventfd readable, and it is not written again",
    (
        "_bootstrap/join_listener.py",
        "JOIN_REQUEST = MessageKind.VIEW, View(frozenset({0})) "
        "JOIN_REQUEST = MessageKind.VIEW, View(frozenset({1}))",
    ): "both ends have the same constant, whose bytes they compare",
    (
        "_bootstrap/join_listener.py",
        "over = pack_message(MessageKind.OVER, View(frozenset({0}))) "
        "over = pack_message(MessageKind.OVER, View(frozenset({1})))",
    ): "nobody reads the view of this message",
    (
        "_bootstrap/join_listener.py",
        "os.eventfd_write(self._wake, 1) os.eventfd_write(self._wake, 2)",
    ): "any number makes the eventfd readable, and one read empties it",
    (
        "_calls/requests.py",
        "return call._replace(finish=decode, feedback=None, keys=(), reduction=reduction, "
        "is_late=True) return call._replace(finish=decode, feedback=None, reduction=reduction, "
        "is_late=True)",
    ): "without feedback= nobody reads the keys",
    (
        "_calls/variable.py",
        "made = np.zeros(_NAME_BYTES // 8 + 1 + _MOST_DIMENSIONS, np.int64) "
        "made = np.zeros(_NAME_BYTES // 8 + 2 + _MOST_DIMENSIONS, np.int64)",
    ): "one number more travels, and nobody reads it",
    (
        "lab/planner/judgement.py",
        "low, high = 0, 1 low, high = 1, 1",
    ): "`low` is only read where a batch of 1 waits, and then it is set anew",
    (
        "torch/ddp/training_state.py",
        "self._resumed = False  # from a saved state, and DDP may still rebuild its buckets "
        "self._resumed = True  # from a saved state, and DDP may still rebuild its buckets",
    ): "without a saved state a job begins at step 0, and in its first steps any layout is right",
    (
        "torch/elastic/session.py",
        "least, wait = (1, 0.0) if self._ending else (self._min_ranks, self._wait) "
        "least, wait = (1, 1.0) if self._ending else (self._min_ranks, self._wait)",
    ): "one rank is enough, so nothing waits for more",
}
