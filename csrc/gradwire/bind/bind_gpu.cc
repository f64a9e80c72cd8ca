#include "gradwire/bind/gpu.h"

#include <pybind11/stl.h>

#include <cstring>
#include <tuple>

#include "gradwire/bind/module.h"
#include "gradwire/cuda/device.h"
#include "gradwire/cuda/messages/messages_host.h"
#include "gradwire/cuda/messages/messages_nccl.h"
#include "gradwire/cuda/messages/messages_routed.h"
#include "gradwire/cuda/model.h"
#include "gradwire/schedule/cost.h"

namespace gradwire::bind {
namespace {

using std::shared_ptr;
using WithoutLock = py::call_guard<Unlocked>;
using Monitor = cuda::GpuFaultMonitor;

// A number of Python's that is an address, or a stream.
struct Address {
  template <typename T>
  operator T*() const {
    return reinterpret_cast<T*>(value);
  }
  std::uintptr_t value;
};
template <typename Arg>
using Plain = std::conditional_t<std::is_same_v<Arg, Address>, std::uintptr_t, Arg>;

// A method of what a handle has, on the handle.
template <auto kMethod, typename... Args>
constexpr auto on_feedback = [](CudaFeedback& self, Plain<Args>... args) {
  return self.with([&](cuda::GpuFeedback& own) { return (own.*kMethod)(Args{args}...); });
};
template <auto kMethod, typename... Args>
constexpr auto on_monitor =
    [](const Gpu& self, Args... args) { return (self.monitor().get()->*kMethod)(args...); };

// Key, address and number of elements of each array.
using KeyedAddresses = std::vector<std::tuple<std::string, std::uintptr_t, std::uint64_t>>;

void mask(CudaFeedback& self, const KeyedAddresses& arrays, std::uintptr_t stream) {
  std::vector<cuda::GpuFeedback::Masked> given;
  for (const auto& [key, address, count] : arrays)
    given.push_back({key, reinterpret_cast<float*>(address), count});
  self.with([&](cuda::GpuFeedback& own) { own.mask(given, stream_of(stream)); });
}

shared_ptr<CudaMessages> loopback(const shared_ptr<cuda::Loopback>& shared, Rank rank, int device,
                                  double timeout) {
  const OnGpu here(device);
  return std::make_shared<CudaMessages>(
      CudaMessages{shared->endpoint(rank, timeout, check_signals), {shared}});
}

shared_ptr<CudaMessages> by_host(const shared_ptr<CommunicatorHandle>& carrier, int device,
                                 double timeout) {
  const OnGpu gpu(device);
  auto messages = std::make_unique<cuda::HostMessages>(gpu.api, carrier->get(), timeout,
                                                       cuda::HostFunctionQueue::here(gpu.api));
  return std::make_shared<CudaMessages>(CudaMessages{std::move(messages), {carrier}});
}

py::bytes nccl_id(const std::vector<std::string>& search) {
  const cuda::nccl::UniqueId id = cuda::make_unique_id(cuda::Nccl::load(search));
  return {reinterpret_cast<const char*>(&id), sizeof id};
}

shared_ptr<CudaMessages> by_nccl(const std::string& id, Rank rank, int size, int device,
                                 double timeout, const std::vector<std::string>& search,
                                 bool blocking) {
  cuda::nccl::UniqueId unique;
  if (id.size() != sizeof unique) throw InvalidArgument("this is no id of NCCL");
  std::memcpy(&unique, id.data(), sizeof unique);
  const OnGpu gpu(device);
  cuda::NcclSettings settings;
  settings.rank = rank;
  settings.size = size;
  settings.timeout_seconds = timeout;
  settings.interrupt = check_signals;
  settings.use_device = [&api = gpu.api, device] {
    api.set_device(device);
    api.relax_captures();
  };
  settings.blocking = blocking;
  auto made = std::make_shared<CudaMessages>();
  made->messages = cuda::make_nccl_messages(cuda::Nccl::load(search), unique, settings);
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

// Returns the device whose memory this is; -1 if it is no device's, and where there is no GPU.
int device_of(std::uintptr_t address) {
  const cuda::Api& api = cuda_api();
  int device = -1;
  const cuda::Status status = api.device_of(reinterpret_cast<const void*>(address), &device);
  return status == 0 ? device : -1;
}

shared_ptr<cuda::Loopback> make_loopback(int size) {
  return std::make_shared<cuda::Loopback>(cuda_api(), size);
}

// Returns the identity of a device, and its name.
std::tuple<std::string, std::string> device_identity(int device) {
  const cuda::Api& api = cuda_api();
  cuda::DeviceInfo info;
  cuda::check(api, api.device_info(device, &info), "cudaGetDeviceProperties");
  std::string id = info.bus_id;
  constexpr char kDigits[] = "0123456789abcdef";
  id += ' ';
  for (std::uint8_t each : info.uuid) {
    id += kDigits[each >> 4U];
    id += kDigits[each & 0xFU];
  }
  return {id, info.name};
}

}  // namespace

void bind_gpu(py::module_& m) {
  py::class_<cuda::Loopback, shared_ptr<cuda::Loopback>>(m, "CudaLoopback")
      .def(py::init(&make_loopback));
  py::class_<CudaMessages, shared_ptr<CudaMessages>>(m, "CudaMessages")
      .def_static("loopback", &loopback)
      .def_static("host", &by_host)
      .def_static("nccl_id", &nccl_id)
      .def_static("nccl", &by_nccl, WithoutLock())
      .def_static("routed", &routed);
  py::class_<CudaEvent>(m, "CudaEvent")
      .def(py::init<int>(), WithoutLock())
      .def("record", &CudaEvent::record, WithoutLock())
      .def("wait", &CudaEvent::wait, WithoutLock())
      .def("done", &CudaEvent::done, WithoutLock());
  py::class_<CudaStream>(m, "CudaStream")
      .def(py::init<int>(), WithoutLock())
      .def_property_readonly("handle", &CudaStream::handle);
  py::class_<CudaMemory>(m, "CudaMemory")
      .def(py::init<int, std::uint64_t>(), WithoutLock())
      .def_property_readonly("address", &CudaMemory::address);
  py::class_<CudaFeedback>(m, "CudaFeedback")
      .def(py::init<shared_ptr<codec::ErrorFeedback>, int>(), WithoutLock())
      .def("begin_step", on_feedback<&cuda::GpuFeedback::begin_step>, WithoutLock())
      .def("end_step", on_feedback<&cuda::GpuFeedback::end_step, bool, Address>, WithoutLock())
      .def("require_finite",
           on_feedback<&cuda::GpuFeedback::require_finite, Address, std::uint64_t, Address>,
           WithoutLock())
      .def("copy_flags", on_feedback<&cuda::GpuFeedback::copy_flags, Address, Address>,
           WithoutLock())
      .def("mask", &mask, WithoutLock())
      .def("scale", on_feedback<&cuda::GpuFeedback::scale, double, Address, Address>, WithoutLock())
      .def("set_loss_scale", on_feedback<&cuda::GpuFeedback::set_loss_scale, float>, WithoutLock())
      .def("bring_home", on_feedback<&cuda::GpuFeedback::bring_home>, WithoutLock())
      .def("send_back", on_feedback<&cuda::GpuFeedback::send_back>, WithoutLock())
      .def_property_readonly("device", &CudaFeedback::device);
  py::class_<Gpu>(m, "Gpu")
      .def(py::init<shared_ptr<CommunicatorHandle>, shared_ptr<CommunicatorHandle>, int,
                    CudaMessages&>(),
           WithoutLock())
      .def("run", &Gpu::run, WithoutLock())
      .def("finish", on_monitor<&Monitor::finish, double>, WithoutLock())
      .def(
          "should_stop", [](const Gpu& self) { return self.monitor()->should_stop(check_signals); },
          WithoutLock())
      .def(
          "should_resize",
          [](const Gpu& self) { return self.monitor()->should_resize(check_signals); },
          WithoutLock())
      .def("set_model", &Gpu::set_model)
      .def("close", &Gpu::close, WithoutLock())
      .def("abort", &Gpu::abort, WithoutLock())
      .def("require_alive", on_monitor<&Monitor::require_alive>, WithoutLock())
      .def("require_success", on_monitor<&Monitor::require_success>, WithoutLock())
      .def_property_readonly("sent", &Gpu::sent)
      .def_property_readonly("messages", &Gpu::messages);
  m.def("gpu_model", &cuda::gpu_model);
  m.def("cuda_is_captured", &is_captured);
  m.def("cuda_device_of", &device_of);
  m.def("cuda_device_identity", &device_identity);
}

}  // namespace gradwire::bind
