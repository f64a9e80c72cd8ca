#include "gradwire/bind/gpu.h"

#include <pybind11/stl.h>

#include <cstring>
#include <optional>
#include <tuple>

#include "gradwire/bind/module.h"
#include "gradwire/cuda/device.h"
#include "gradwire/cuda/messages_host.h"
#include "gradwire/cuda/messages_nccl.h"
#include "gradwire/cuda/messages_routed.h"
#include "gradwire/schedule/cost.h"

namespace gradwire::bind {
namespace {

using std::shared_ptr;
using WithoutLock = py::call_guard<Unlocked>;

cuda::Stream stream_of(std::uintptr_t handle) { return reinterpret_cast<cuda::Stream>(handle); }

// An event of one device.
class CudaEvent {
 public:
  explicit CudaEvent(int device) : api_(cuda::load_api()), device_(device) {
    const cuda::OnDevice here(api_, device_);
    event_.emplace(api_);
  }
  void record(std::uintptr_t stream) {
    const cuda::OnDevice here(api_, device_);
    cuda::check(api_, api_.record(event_->get(), stream_of(stream)), "cudaEventRecord");
  }
  void wait(std::uintptr_t stream) const {
    const cuda::OnDevice here(api_, device_);
    cuda::check(api_, api_.wait(stream_of(stream), event_->get()), "cudaStreamWaitEvent");
  }
  bool done() const {
    int found = 0;
    cuda::check(api_, api_.query(event_->get(), &found), "cudaEventQuery");
    return found != 0;
  }

 private:
  const cuda::Api& api_;
  int device_;
  std::optional<cuda::OwnedEvent> event_;
};

class CudaStream {
 public:
  explicit CudaStream(int device) {
    const cuda::Api& api = cuda::load_api();
    const cuda::OnDevice here(api, device);
    stream_.emplace(api);
  }
  std::uintptr_t handle() const { return reinterpret_cast<std::uintptr_t>(stream_->get()); }

 private:
  std::optional<cuda::OwnedStream> stream_;
};

class CudaFeedback {
 public:
  CudaFeedback(shared_ptr<codec::ErrorFeedback> host, int device)
      : api_(cuda::load_api()), device_(device) {
    const cuda::OnDevice here(api_, device_);
    own_.emplace(api_, std::move(host));
  }
  cuda::Feedback& get() { return *own_; }
  void begin_step() { own_->begin_step(); }
  void end_step(bool keep, std::uintptr_t stream) {
    on([&] { own_->end_step(keep, stream_of(stream)); });
  }
  void require_finite(std::uintptr_t address, std::uint64_t count, std::uintptr_t stream) {
    on([&] {
      own_->require_finite(reinterpret_cast<const float*>(address), count, stream_of(stream));
    });
  }
  void bring_home(std::uintptr_t stream) {
    on([&] { own_->bring_home(stream_of(stream)); });
  }
  void send_back(std::uintptr_t stream) {
    on([&] { own_->send_back(stream_of(stream)); });
  }
  int device() const { return device_; }

 private:
  template <typename Body>
  void on(Body body) {
    const cuda::OnDevice here(api_, device_);
    body();
  }
  const cuda::Api& api_;
  int device_;
  std::optional<cuda::Feedback> own_;
};

shared_ptr<CudaMessages> loopback(shared_ptr<cuda::Loopback> shared, Rank rank, double timeout) {
  auto made = std::make_shared<CudaMessages>();
  made->messages = shared->endpoint(rank, timeout, check_signals);
  made->kept.push_back(std::move(shared));
  return made;
}

shared_ptr<CudaMessages> by_host(shared_ptr<Communicator> carrier, int device, double timeout) {
  const cuda::Api& api = cuda::load_api();
  const cuda::OnDevice here(api, device);
  auto made = std::make_shared<CudaMessages>();
  made->messages = std::make_unique<cuda::HostMessages>(api, carrier->get(), timeout);
  made->kept.push_back(std::move(carrier));
  return made;
}

py::bytes nccl_id(const std::vector<std::string>& search) {
  const cuda::nccl::UniqueId id = cuda::make_unique_id(cuda::Nccl::load(search));
  return {reinterpret_cast<const char*>(&id), sizeof id};
}

shared_ptr<CudaMessages> by_nccl(const std::string& id, Rank rank, int size, int device,
                                 double timeout, const std::vector<std::string>& search) {
  cuda::nccl::UniqueId unique;
  if (id.size() != sizeof unique) throw InvalidArgument("this is no id of NCCL");
  std::memcpy(&unique, id.data(), sizeof unique);
  const cuda::Api& api = cuda::load_api();
  const cuda::OnDevice here(api, device);
  cuda::NcclSettings settings;
  settings.rank = rank;
  settings.size = size;
  settings.timeout_seconds = timeout;
  settings.interrupt = check_signals;
  settings.use_device = [&api, device] { api.set_device(device); };
  auto made = std::make_shared<CudaMessages>();
  made->messages = cuda::make_nccl_messages(cuda::Nccl::load(search), unique, std::move(settings));
  return made;
}

shared_ptr<CudaMessages> routed(const std::vector<shared_ptr<CudaMessages>>& ways,
                                const std::vector<std::pair<std::size_t, Rank>>& routes) {
  auto made = std::make_shared<CudaMessages>();
  std::vector<std::unique_ptr<cuda::Messages>> taken;
  for (const auto& each : ways) {
    taken.push_back(std::move(each->messages));
    made->kept.insert(made->kept.end(), each->kept.begin(), each->kept.end());
  }
  std::vector<cuda::RoutedMessages::Route> way_of;
  for (const auto& [way, rank] : routes) way_of.push_back({way, rank});
  made->messages = std::make_unique<cuda::RoutedMessages>(std::move(taken), std::move(way_of));
  return made;
}

// -1 for what is no device's memory, and where there is no GPU.
int device_of(std::uintptr_t address) {
  const cuda::Api& api = cuda::load_api();
  int device = -1;
  const cuda::Status status = api.device_of(reinterpret_cast<const void*>(address), &device);
  return status == 0 ? device : -1;
}

shared_ptr<cuda::Loopback> make_loopback(int size, int device) {
  const cuda::Api& api = cuda::load_api();
  const cuda::OnDevice here(api, device);
  return std::make_shared<cuda::Loopback>(api, size);
}

// What identifies a device, and how it is called.
std::tuple<std::string, std::string> device_identity(int device) {
  const cuda::Api& api = cuda::load_api();
  cuda::DeviceFacts facts;
  cuda::check(api, api.device_facts(device, &facts), "cudaGetDeviceProperties");
  std::string id = facts.bus_id;
  constexpr char kDigits[] = "0123456789abcdef";
  id += ' ';
  for (std::uint8_t each : facts.uuid) {
    id += kDigits[each >> 4U];
    id += kDigits[each & 0xFU];
  }
  return {id, facts.name};
}

}  // namespace

Gpu::Gpu(shared_ptr<Communicator> users, shared_ptr<Communicator> side, int device,
         CudaMessages& messages)
    : users_(std::move(users)), side_(std::move(side)) {
  const cuda::Api& api = cuda::load_api();
  const cuda::OnDevice here(api, device);
  kept_.kept = messages.kept;
  const exec::Identity& identity = users_->get().identity();
  cuda::Communicator::Setting setting{identity.rank, identity.size, identity.hosts, device};
  gpu_ =
      std::make_unique<cuda::Communicator>(api, std::move(setting), std::move(messages.messages));
  messages_ = gpu_->messages();
  watch_ = std::make_unique<cuda::Watch>(*gpu_, side_->get(), users_->get());
}

void Gpu::run(const Request& request, cuda::Feedback* feedback, std::uintptr_t stream,
              double timeout) {
  watch().run(request.view(timeout), feedback, stream_of(stream));
}

cuda::Watch& Gpu::watch() const {
  if (!watch_) throw Aborted("this communicator is closed");
  return *watch_;
}

void Gpu::abort(const std::string& reason) noexcept {
  if (watch_) watch_->abort(reason);
}

void Gpu::close() {
  if (!gpu_) return;
  sent_ = gpu_->sent();
  watch_.reset();
  gpu_.reset();
}

void bind_gpu(py::module_& m) {
  py::class_<cuda::Loopback, shared_ptr<cuda::Loopback>>(m, "CudaLoopback")
      .def(py::init(&make_loopback), py::arg("size"), py::arg("device"));
  py::class_<CudaMessages, shared_ptr<CudaMessages>>(m, "CudaMessages")
      .def_static("loopback", &loopback, py::arg("shared"), py::arg("rank"), py::arg("timeout"))
      .def_static("host", &by_host, py::arg("carrier"), py::arg("device"), py::arg("timeout"))
      .def_static("nccl_id", &nccl_id, py::arg("search"))
      .def_static("nccl", &by_nccl, py::arg("id"), py::arg("rank"), py::arg("size"),
                  py::arg("device"), py::arg("timeout"), py::arg("search"), WithoutLock())
      .def_static("routed", &routed, py::arg("ways"), py::arg("routes"));
  py::class_<CudaEvent>(m, "CudaEvent")
      .def(py::init<int>(), py::arg("device"))
      .def("record", &CudaEvent::record, py::arg("stream"))
      .def("wait", &CudaEvent::wait, py::arg("stream"))
      .def("done", &CudaEvent::done);
  py::class_<CudaStream>(m, "CudaStream")
      .def(py::init<int>(), py::arg("device"))
      .def_property_readonly("handle", &CudaStream::handle);
  py::class_<CudaFeedback>(m, "CudaFeedback")
      .def(py::init<shared_ptr<codec::ErrorFeedback>, int>(), py::arg("host"), py::arg("device"))
      .def("begin_step", &CudaFeedback::begin_step)
      .def("end_step", &CudaFeedback::end_step, py::arg("keep"), py::arg("stream"))
      .def("require_finite", &CudaFeedback::require_finite, py::arg("address"), py::arg("count"),
           py::arg("stream"))
      .def("bring_home", &CudaFeedback::bring_home, py::arg("stream"), WithoutLock())
      .def("send_back", &CudaFeedback::send_back, py::arg("stream"), WithoutLock())
      .def_property_readonly("device", &CudaFeedback::device);
  py::class_<Gpu>(m, "Gpu")
      .def(py::init<shared_ptr<Communicator>, shared_ptr<Communicator>, int, CudaMessages&>(),
           py::arg("users"), py::arg("side"), py::arg("device"), py::arg("messages"))
      .def(
          "run",
          [](Gpu& self, const Request& request, CudaFeedback* feedback, std::uintptr_t stream,
             double timeout) {
            self.run(request, feedback == nullptr ? nullptr : &feedback->get(), stream, timeout);
          },
          py::arg("request"), py::arg("feedback").none(true), py::arg("stream"), py::arg("timeout"),
          WithoutLock())
      .def("finish", &Gpu::finish, py::arg("timeout"), WithoutLock())
      .def("close", &Gpu::close, WithoutLock())
      .def("abort", &Gpu::abort, py::arg("reason"), WithoutLock())
      .def("require_alive", &Gpu::require_alive)
      .def_property_readonly("sent", &Gpu::sent)
      .def_property_readonly("messages", &Gpu::messages);
  m.def("cuda_device_of", &device_of, py::arg("address"));
  m.def("cuda_device_identity", &device_identity, py::arg("device"));
}

}  // namespace gradwire::bind
