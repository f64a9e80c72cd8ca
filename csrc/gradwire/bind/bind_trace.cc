#include <pybind11/stl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "gradwire/bind/module.h"
#include "gradwire/exec/trace/recorder.h"
#include "gradwire/exec/trace/totals.h"

namespace gradwire::bind {
namespace {

using Read =
    std::tuple<py::bytes, std::uint64_t, std::map<std::uint64_t, std::string>, std::uint64_t>;

// Returns the events as they lie in memory, how many were dropped before them, the texts of their
// labels, and how many texts had no room.
Read read(const exec::Recorder& recorder) {
  exec::Recorder::Events found;
  {
    const py::gil_scoped_release unlocked;
    found = recorder.read();
  }
  const auto* data = reinterpret_cast<const char*>(found.events.data());
  return {py::bytes(data, found.events.size() * sizeof(exec::Event)), found.dropped,
          std::move(found.labels), found.unlabelled};
}

double seconds(const exec::Count& nanoseconds) {
  return static_cast<double>(nanoseconds.read()) / 1e9;
}

std::string_view error_name(transport::FailureKind kind) {
  switch (kind) {
    case transport::FailureKind::kTimeout:
      return "Timeout";
    case transport::FailureKind::kAborted:
      return "Aborted";
    case transport::FailureKind::kInvalidArgument:
      return "InvalidArgument";
    case transport::FailureKind::kTransport:
    case transport::FailureKind::kOther:
      break;
  }
  return "TransportError";
}

// Returns (collective, codec, calls, failed, seconds, bytes of inputs, bytes sent) of calls.
py::list calls(const exec::Totals& totals) {
  py::list found;
  for (const auto& [collective, codec, counts] : totals.calls())
    found.append(py::make_tuple(name_of(collective), codec, counts->calls.read(),
                                counts->failed.read(), seconds(counts->nanoseconds),
                                counts->input_bytes.read(), counts->sent_bytes.read()));
  return found;
}

// Returns (bytes sent, received, messages sent, received, seconds until it sent, until it read) of
// each peer.
py::list peers(const exec::Totals& totals) {
  py::list found;
  for (const exec::Totals::Peer& each : totals.peers)
    found.append(py::make_tuple(each.sent_bytes.read(), each.received_bytes.read(),
                                each.sends.read(), each.receives.read(),
                                seconds(each.late_nanoseconds), seconds(each.full_nanoseconds)));
  return found;
}

// Returns the name of the error that ended the communicator, and the culprit's rank in the job.
py::object failure(const exec::Totals& totals) {
  const auto found = totals.failure();
  if (!found) return py::none();
  return py::make_tuple(error_name(found->kind), found->job_peer);
}

}  // namespace

void bind_trace(py::module_& m) {
  py::class_<exec::Recorder, std::shared_ptr<exec::Recorder>>(m, "Recorder")
      .def(py::init<std::size_t, std::int64_t>(), py::arg("events"), py::arg("skew") = 0)
      .def("read", &read);
  py::class_<exec::Totals, std::shared_ptr<exec::Totals>>(m, "Totals")
      .def(py::init<int>())
      .def("calls", &calls)
      .def("peers", &peers)
      .def("failure", &failure);
}

}  // namespace gradwire::bind
