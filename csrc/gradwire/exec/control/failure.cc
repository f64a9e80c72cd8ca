#include "gradwire/exec/control/failure.h"

#include <string>
#include <string_view>
#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/exec/control/mismatch_report.h"

namespace gradwire::exec {
namespace {

using transport::ControlFrame;
using transport::FailureKind;

// Begins the text of a failure that was found in another communicator.
constexpr std::string_view kOtherGroup = "another group failed, that of ";

ControlFrame make(FailureKind kind, Rank culprit, const char* text) noexcept {
  ControlFrame frame;
  frame.type = transport::ControlType::kFailure;
  frame.kind = kind;
  frame.culprit = culprit;
  transport::set_text(frame, text);
  return frame;
}

ControlFrame make(FailureKind kind, const PeerError& error) noexcept {
  ControlFrame frame = make(kind, error.peer(), error.what());
  frame.value = static_cast<std::uint64_t>(error.job_peer() + 1);
  if (error.only_this_communicator()) frame.flags |= transport::kOnlyThisCommunicator;
  return frame;
}

Rank job_peer_of(const ControlFrame& failure) noexcept {
  return static_cast<Rank>(failure.value) - 1;
}

Rank job_peer_of(const PeerError& error, const Identity& identity) {
  const bool member = error.peer() >= 0 && error.peer() < identity.size;
  return member ? identity.job_rank(error.peer()) : error.job_peer();
}

std::string named_text(const PeerError& error, Rank job_peer) {
  std::string text = error.what();
  if (job_peer != error.peer())
    text += "; rank " + std::to_string(error.peer()) + " here is rank " + std::to_string(job_peer) +
            " of the job";
  return text;
}

std::exception_ptr make_error(FailureKind kind, const std::string& text, Rank peer, Rank job_peer,
                              bool alone) {
  switch (kind) {
    case FailureKind::kTimeout:
      return std::make_exception_ptr(Timeout(text, peer, job_peer, alone));
    case FailureKind::kAborted:
      return std::make_exception_ptr(Aborted(text, peer, job_peer, alone));
    case FailureKind::kInvalidArgument:
      return std::make_exception_ptr(InvalidArgument(text));
    case FailureKind::kTransport:
    case FailureKind::kOther:
      break;
  }
  return std::make_exception_ptr(TransportError(text, peer, job_peer, alone));
}

std::vector<Rank> all_ranks(const Identity& identity) {
  std::vector<Rank> all;
  for (Rank rank = 0; rank < identity.size; ++rank) all.push_back(identity.job_rank(rank));
  return all;
}

}  // namespace

ControlFrame failure_frame(const std::exception_ptr& error, Rank rank) noexcept {
  try {
    std::rethrow_exception(error);
  } catch (const TransportError& e) {
    return make(FailureKind::kTransport, e);
  } catch (const Timeout& e) {
    return make(FailureKind::kTimeout, e);
  } catch (const Aborted& e) {
    return make(FailureKind::kAborted, e);
  } catch (const InvalidArgument& e) {
    return make(FailureKind::kInvalidArgument, rank, e.what());
  } catch (const std::exception& e) {
    return make(FailureKind::kOther, rank, e.what());
  } catch (...) {
    return make(FailureKind::kOther, rank, "an unknown failure");
  }
}

std::exception_ptr error_of(const ControlFrame& failure) {
  return make_error(failure.kind, transport::text_of(failure), failure.culprit,
                    job_peer_of(failure), (failure.flags & transport::kOnlyThisCommunicator) != 0);
}

std::exception_ptr with_job_peer(const std::exception_ptr& error, const Identity& identity) {
  try {
    std::rethrow_exception(error);
  } catch (const PeerError& e) {
    const Rank job_peer = job_peer_of(e, identity);
    if (job_peer == e.job_peer()) return error;
    return make_error(failure_frame(error, identity.rank).kind, named_text(e, job_peer), e.peer(),
                      job_peer, e.only_this_communicator());
  } catch (...) {
    return error;
  }
}

bool fails_family(const ControlFrame& failure) noexcept {
  return failure.kind != FailureKind::kInvalidArgument &&
         (failure.flags & transport::kOnlyThisCommunicator) == 0;
}

ControlFrame translated(ControlFrame failure, const Identity& there, const Identity& here) {
  const Rank job_peer =
      failure.culprit == kNoPeer ? job_peer_of(failure) : there.job_rank(failure.culprit);
  failure.culprit = here.member(job_peer);
  failure.value = static_cast<std::uint64_t>(job_peer + 1);
  const std::string text = transport::text_of(failure);
  if (!text.starts_with(kOtherGroup))
    transport::set_text(
        failure, std::string(kOtherGroup) + name_ranks(all_ranks(there)) + " of the job: " + text);
  return failure;
}

}  // namespace gradwire::exec
