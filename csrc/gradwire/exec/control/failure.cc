#include "gradwire/exec/control/failure.h"

#include <string>

#include "gradwire/base/error.h"

namespace gradwire::exec {
namespace {

using transport::ControlFrame;
using transport::FailureKind;

ControlFrame make(FailureKind kind, Rank culprit, const char* text) noexcept {
  ControlFrame frame;
  frame.type = transport::ControlType::kFailure;
  frame.kind = kind;
  frame.culprit = culprit;
  transport::set_text(frame, text);
  return frame;
}

}  // namespace

ControlFrame failure_frame(const std::exception_ptr& error, Rank rank) noexcept {
  try {
    std::rethrow_exception(error);
  } catch (const TransportError& e) {
    return make(FailureKind::kTransport, e.peer(), e.what());
  } catch (const Timeout& e) {
    return make(FailureKind::kTimeout, e.peer(), e.what());
  } catch (const Aborted& e) {
    return make(FailureKind::kAborted, e.peer(), e.what());
  } catch (const InvalidArgument& e) {
    return make(FailureKind::kInvalidArgument, rank, e.what());
  } catch (const std::exception& e) {
    return make(FailureKind::kOther, rank, e.what());
  } catch (...) {
    return make(FailureKind::kOther, rank, "an unknown failure");
  }
}

std::exception_ptr error_of(const ControlFrame& failure) {
  const std::string text = transport::text_of(failure);
  switch (failure.kind) {
    case FailureKind::kTransport:
      return std::make_exception_ptr(TransportError(text, failure.culprit));
    case FailureKind::kTimeout:
      return std::make_exception_ptr(Timeout(text, failure.culprit));
    case FailureKind::kAborted:
      return std::make_exception_ptr(Aborted(text, failure.culprit));
    case FailureKind::kInvalidArgument:
      return std::make_exception_ptr(InvalidArgument(text));
    case FailureKind::kOther:
      break;
  }
  return std::make_exception_ptr(TransportError(text, failure.culprit));
}

}  // namespace gradwire::exec
