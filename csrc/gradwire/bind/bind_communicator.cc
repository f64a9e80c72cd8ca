#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/base/exit.h"
#include "gradwire/base/stop_request.h"
#include "gradwire/bind/codec_handle.h"
#include "gradwire/bind/communicator_handle.h"
#include "gradwire/bind/module.h"
#include "gradwire/exec/trace/counting.h"
#include "gradwire/exec/trace/recorder.h"
#include "gradwire/transport/transport.h"
#include "gradwire/transport/ways/ways.h"

namespace gradwire::bind {
namespace {

using WithoutLock = py::call_guard<Unlocked>;
using CommunicatorClass = py::class_<CommunicatorHandle, std::shared_ptr<CommunicatorHandle>>;
using std::shared_ptr;

template <auto kMethod, typename... Args>
constexpr auto on_core = on<CommunicatorHandle, kMethod, Args...>;

exec::Lane parse_lane(const std::string& name) {
  if (name == "collective") return exec::Lane::kCollective;
  if (name == "p2p") return exec::Lane::kPointToPoint;
  throw InvalidArgument("'" + name + "' is no lane: collective, p2p");
}

// Which sockets of a way that is made anew are a lane's.
int part_of(exec::Lane lane) { return transport::kControlPart + 1 + static_cast<int>(lane); }

OwnedRequest make_request(const std::string& collective, const std::string& dtype,
                          const std::string& op, Rank root, const OwnedRequest::Addresses& inputs,
                          const OwnedRequest::Addresses& outputs, std::string algorithm,
                          shared_ptr<schedule::Schedule> schedule, const CodecHandle* codec) {
  exec::Request fixed;
  fixed.collective = parse_collective(collective);
  fixed.dtype = parse_dtype(dtype);
  fixed.op = parse_reduce_op(op);
  fixed.root = root;
  if (codec != nullptr) fixed.codec = codec->value;
  return {std::move(fixed), std::move(algorithm), std::move(schedule), inputs, outputs};
}

// Takes over the descriptor, even if a later line throws.
void adopt_control(CommunicatorHandle& self, int fd, shared_ptr<crypto::Seal> seal, Rank peer,
                   shared_ptr<transport::Ways> ways, int way) {
  transport::Connection connection(UniqueFd(fd), std::move(seal));
  connection.ways = std::move(ways);
  connection.way = way;
  self.get().adopt_control(std::move(connection), peer);
}

void adopt_link(CommunicatorHandle& self, const std::string& lane, const std::string& transport,
                const std::vector<std::pair<int, shared_ptr<crypto::Seal>>>& streams, Rank peer,
                double timeout, const shared_ptr<transport::Ways>& ways,
                const std::vector<std::pair<int, bool>>& roles) {
  std::vector<transport::Connection> all;
  for (const auto& [fd, seal] : streams) all.emplace_back(UniqueFd(fd), seal);
  if (all.empty()) throw InvalidArgument("a link needs a socket");
  if (ways && roles.size() != all.size()) throw InvalidArgument("each socket belongs to a way");
  for (std::size_t i = 0; ways && i < all.size(); ++i) {
    all[i].ways = ways;
    all[i].part = part_of(parse_lane(lane));
    std::tie(all[i].way, all[i].acknowledges) = roles[i];
    if (all[i].way < 0 || all[i].way >= ways->count()) throw InvalidArgument("no such way");
  }
  transport::Connection connection = std::move(all.front());
  for (auto& each : std::span(all).subspan(1)) connection.more.push_back(std::move(each));
  self.get().adopt_link(parse_lane(lane), transport, std::move(connection), peer, timeout,
                        check_signals);
}

shared_ptr<Work> submit(CommunicatorHandle& self, const OwnedRequest& request, double timeout,
                        py::object memory) {
  shared_ptr<Work> work;
  {
    const Unlocked unlocked;
    work = self.get().submit(request.view(timeout));
  }
  return self.keep(std::move(work), std::move(memory));
}

shared_ptr<Work> send(CommunicatorHandle& self, std::uintptr_t address, std::size_t bytes, Rank to,
                      double timeout, py::object memory, const std::string& packed_as) {
  auto* data = reinterpret_cast<std::byte*>(address);
  std::optional<DType> dtype;
  if (!packed_as.empty()) dtype = parse_dtype(packed_as);
  return self.keep(self.get().send(data, bytes, to, timeout, dtype), std::move(memory));
}

shared_ptr<Work> receive(CommunicatorHandle& self, std::uintptr_t address, std::size_t bytes,
                         Rank source, double timeout, py::object memory) {
  auto* data = reinterpret_cast<std::byte*>(address);
  return self.keep(self.get().receive(data, bytes, source, timeout), std::move(memory));
}

std::tuple<std::uint64_t, std::uint64_t, double, double> traffic(const CommunicatorHandle& self) {
  const exec::Traffic all = self.get().traffic();
  return {all.bytes_sent, all.frames_sent, all.codec.encode, all.codec.decode};
}

void observe(CommunicatorHandle& self, shared_ptr<exec::Recorder> recorder,
             shared_ptr<exec::Totals> totals) {
  if (!totals) return self.get().observe(std::move(recorder));
  self.get().observe(std::make_shared<exec::Counting>(std::move(totals), std::move(recorder)));
}

std::vector<std::string_view> reductions(const std::string& dtype) {
  std::vector<std::string_view> defined;
  for (int i = 0; i < kReduceOps; ++i)
    if (const auto op = static_cast<ReduceOp>(i); is_defined(op, parse_dtype(dtype)))
      defined.push_back(name_of(op));
  return defined;
}

void close(CommunicatorHandle& self, double timeout, std::optional<double> settle, bool alone) {
  {
    const Unlocked unlocked;
    self.get().close(timeout, settle.value_or(timeout), check_signals, alone);
  }
  self.forget_finished();
}

// Returns (peer, descriptor, its keys, what was read of the next frame) for each socket.
std::vector<std::tuple<Rank, int, shared_ptr<crypto::Seal>, py::bytes>> release_controls(
    CommunicatorHandle& self) {
  std::vector<std::pair<Rank, transport::Released>> released;
  {
    const Unlocked unlocked;
    released = self.get().release_controls();
  }
  self.forget_finished();
  std::vector<std::tuple<Rank, int, shared_ptr<crypto::Seal>, py::bytes>> out;
  for (auto& [peer, control] : released)
    out.emplace_back(peer, -1, control.connection.seal, control.received);
  for (std::size_t i = 0; i < out.size(); ++i)
    std::get<1>(out[i]) = released[i].second.connection.socket.release();
  return out;
}

void bind_request(py::module_& m) {
  py::class_<OwnedRequest>(m, "Request")
      .def(py::init(&make_request), py::arg("collective"), py::arg("dtype"), py::arg("op"),
           py::arg("root"), py::arg("inputs"), py::arg("outputs"), py::arg("algorithm") = "auto",
           py::arg("schedule") = nullptr, py::arg("codec") = nullptr)
      .def("feed_back", &OwnedRequest::feed_back)
      .def("shape", &OwnedRequest::shape)
      .def("exchange", &OwnedRequest::exchange)
      .def("label", &OwnedRequest::label)
      .def("move", &OwnedRequest::move)
      .def("name", &OwnedRequest::name)
      .def("check_shape", &OwnedRequest::check_shape);
}

void bind_work(py::module_& m) {
  py::class_<Work, shared_ptr<Work>>(m, "Work")
      .def("done", &Work::done)
      .def("source", &Work::source);
}

void bind_set_up(CommunicatorClass& c) {
  c.def(py::init([](Rank rank, int size, std::uint32_t communicator,
                    std::vector<std::vector<Rank>> hosts, std::size_t max_message,
                    std::size_t segment_bytes, double stall_seconds, std::string job,
                    std::uint64_t tag, std::string about, transport::Contexts contexts,
                    std::vector<Rank> job_ranks, shared_ptr<StopRequest> stop_request,
                    shared_ptr<exec::ProgressThread> progress) {
          return std::make_unique<CommunicatorHandle>(
              exec::Identity{rank, size, communicator, std::move(hosts), std::move(job), tag,
                             std::move(about), std::move(job_ranks)},
              exec::Tuning{.max_message = max_message,
                           .segment_bytes = segment_bytes,
                           .stall_seconds = stall_seconds,
                           .contexts = std::move(contexts),
                           .stop_request = std::move(stop_request),
                           .progress = std::move(progress)});
        }),
        py::arg("rank"), py::arg("size"), py::arg("communicator"), py::arg("hosts"),
        py::arg("max_message") = exec::Tuning{}.max_message,
        py::arg("segment_bytes") = exec::Tuning{}.segment_bytes,
        py::arg("stall_seconds") = exec::Tuning{}.stall_seconds, py::arg("job") = "",
        py::arg("tag") = 0, py::arg("about") = "", py::arg("contexts") = transport::Contexts{},
        py::arg("job_ranks") = std::vector<Rank>{}, py::arg("stop_request") = nullptr,
        py::arg("progress") = nullptr)
      .def("adopt_control", &adopt_control, WithoutLock(), py::arg(), py::arg(), py::arg(),
           py::arg("ways") = nullptr, py::arg("way") = 0)
      .def("adopt_link", &adopt_link, WithoutLock(), py::arg(), py::arg(), py::arg(), py::arg(),
           py::arg(), py::arg("ways") = nullptr,
           py::arg("roles") = std::vector<std::pair<int, bool>>())
      .def("join", on_core<&exec::Communicator::join, shared_ptr<exec::Family>>, WithoutLock());
}

void bind_calls(CommunicatorClass& c) {
  c.def(
       "run",
       [](CommunicatorHandle& self, const OwnedRequest& request, double timeout) {
         self.get().run(request.view(timeout), check_signals);
       },
       WithoutLock())
      .def("submit", &submit)
      .def("send", &send)
      .def("receive", &receive)
      .def(
          "wait",
          [](CommunicatorHandle& self, Work& work, double timeout, bool background) {
            {
              const Unlocked unlocked;
              self.get().wait(work, timeout, check_signals, background);
            }
            self.forget_finished();
          },
          py::arg("work"), py::arg("timeout"), py::arg("background") = false)
      .def("begin_wait",
           [](CommunicatorHandle& self, Rank sender) { self.get().awaited_senders().add(sender); })
      .def("end_wait", [](CommunicatorHandle& self,
                          Rank sender) { self.get().awaited_senders().remove(sender); })
      .def("request_stop", on_core<&exec::Communicator::request_stop>)
      .def(
          "should_stop",
          [](CommunicatorHandle& self) { return self.get().should_stop(check_signals); },
          WithoutLock())
      .def("request_resize", on_core<&exec::Communicator::request_resize>)
      .def(
          "should_resize",
          [](CommunicatorHandle& self) { return self.get().should_resize(check_signals); },
          WithoutLock());
}

void bind_end(CommunicatorClass& c) {
  c.def("abort", on_core<&exec::Communicator::abort, const std::string&, bool>, py::arg("reason"),
        py::arg("alone") = true, WithoutLock())
      .def("close", &close, py::arg("timeout"), py::arg("settle") = py::none(),
           py::arg("alone") = true)
      .def("settled", on_core<&exec::Communicator::is_confirmed>, WithoutLock())
      .def("drop", on_core<&exec::Communicator::drop>, WithoutLock())
      .def("check_failure", on_core<&exec::Communicator::check_failure, double>, WithoutLock())
      .def("release_controls", &release_controls);
}

void bind_state(CommunicatorClass& c) {
  c.def("set_model", on_core<&exec::Communicator::set_model, const schedule::CostModel&>,
        WithoutLock())
      .def(
          "set_sites",
          [](CommunicatorHandle& self, std::vector<std::vector<Rank>> ranks, double latency,
             double seconds_of_byte) {
            self.get().set_sites({std::move(ranks), latency, seconds_of_byte});
          },
          WithoutLock())
      .def("set_patience", on_core<&exec::Communicator::set_patience, double>)
      .def("observe", &observe, py::arg("recorder"), py::arg("totals") = nullptr, WithoutLock())
      .def("release_after_fork", &CommunicatorHandle::release_after_fork)
      .def_property_readonly("owned_here", &CommunicatorHandle::owned_here)
      .def_property_readonly("closed", on_core<&exec::Communicator::closed>)
      .def_property_readonly("traffic", &traffic);
}

}  // namespace

void bind_communicator(py::module_& m) {
  bind_request(m);
  bind_work(m);
  py::class_<StopRequest, shared_ptr<StopRequest>>(m, "StopRequest")
      .def(py::init<>())
      .def("make", &StopRequest::make)
      .def("make_at", &StopRequest::make_at)
      .def("made", &StopRequest::made);
  py::class_<exec::Family, shared_ptr<exec::Family>>(m, "Family").def(py::init<>());
  py::class_<exec::ProgressThread, shared_ptr<exec::ProgressThread>>(m, "ProgressThread")
      .def(py::init<>());
  CommunicatorClass c(m, "Communicator");
  bind_set_up(c);
  bind_calls(c);
  bind_end(c);
  bind_state(c);
  m.def("reductions", &reductions);
  const transport::ControlFrame frame;
  m.attr("CONTROL_FRAME_BYTES") = sizeof frame;
  m.attr("CONTROL_MAGIC") =
      py::bytes(reinterpret_cast<const char*>(&frame.magic), sizeof frame.magic);
  m.attr("RELEASED_MAGIC") =
      py::bytes(transport::kReleasedMagic.data(), transport::kReleasedMagic.size());
  m.def("await_calls", &await_calls);
  m.def("forget_calls", &forget_calls);
  m.def("end_with", &end_with);
}

}  // namespace gradwire::bind
