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

shared_ptr<CudaMessages> loopback(shared_ptr<cuda::Loopback> shared, Rank rank, int device,
                                  double timeout) {
  const cuda::OnDevice here(cuda_api(), device);
  auto made = std::make_shared<CudaMessages>();
  made->messages = shared->endpoint(rank, timeout, check_signals);
  made->kept.push_back(std::move(shared));
  return made;
}

shared_ptr<CudaMessages> by_host(shared_ptr<Communicator> carrier, int device, double timeout) {
  const cuda::Api& api = cuda_api();
  const cuda::OnDevice here(api, device);
  auto made = std::make_shared<CudaMessages>();
  made->messages = std::make_unique<cuda::HostMessages>(api, carrier->get(), timeout,
                                                        cuda::HostTurns::here(api));
  made->kept.push_back(std::move(carrier));
  return made;
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
  const cuda::Api& api = cuda_api();
  const cuda::OnDevice here(api, device);
  cuda::NcclSettings settings;
  settings.rank = rank;
  settings.size = size;
  settings.timeout_seconds = timeout;
  settings.interrupt = check_signals;
  settings.use_device = [&api, device] {
    api.set_device(device);
    api.relax_captures();
  };
  settings.blocking = blocking;
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
      .def(py::init(&make_loopback), py::arg("size"));
  py::class_<CudaMessages, shared_ptr<CudaMessages>>(m, "CudaMessages")
      .def_static("loopback", &loopback, py::arg("shared"), py::arg("rank"), py::arg("device"),
                  py::arg("timeout"))
      .def_static("host", &by_host, py::arg("carrier"), py::arg("device"), py::arg("timeout"))
      .def_static("nccl_id", &nccl_id, py::arg("search"))
      .def_static("nccl", &by_nccl, py::arg("id"), py::arg("rank"), py::arg("size"),
                  py::arg("device"), py::arg("timeout"), py::arg("search"), py::arg("blocking"),
                  WithoutLock())
      .def_static("routed", &routed, py::arg("ways"), py::arg("routes"));
  py::class_<CudaEvent>(m, "CudaEvent")
      .def(py::init<int>(), py::arg("device"), WithoutLock())
      .def("record", &CudaEvent::record, py::arg("stream"), WithoutLock())
      .def("wait", &CudaEvent::wait, py::arg("stream"), WithoutLock())
      .def("done", &CudaEvent::done, WithoutLock());
  py::class_<CudaStream>(m, "CudaStream")
      .def(py::init<int>(), py::arg("device"), WithoutLock())
      .def_property_readonly("handle", &CudaStream::handle);
  py::class_<CudaMemory>(m, "CudaMemory")
      .def(py::init<int, std::uint64_t>(), py::arg("device"), py::arg("bytes"), WithoutLock())
      .def_property_readonly("address", &CudaMemory::address);
  py::class_<CudaFeedback>(m, "CudaFeedback")
      .def(py::init<shared_ptr<codec::ErrorFeedback>, int>(), py::arg("host"), py::arg("device"),
           WithoutLock())
      .def("begin_step", &CudaFeedback::begin_step, WithoutLock())
      .def("end_step", &CudaFeedback::end_step, py::arg("keep"), py::arg("stream"), WithoutLock())
      .def("require_finite", &CudaFeedback::require_finite, py::arg("address"), py::arg("count"),
           py::arg("stream"), WithoutLock())
      .def("copy_flags", &CudaFeedback::copy_flags, py::arg("to"), py::arg("stream"), WithoutLock())
      .def("mask", &CudaFeedback::mask, py::arg("arrays"), py::arg("stream"), WithoutLock())
      .def("scale", &CudaFeedback::scale, py::arg("factor"), py::arg("loss_scale"),
           py::arg("after"), WithoutLock())
      .def("set_loss_scale", &CudaFeedback::set_loss_scale, py::arg("last"), WithoutLock())
      .def("bring_home", &CudaFeedback::bring_home, WithoutLock())
      .def("send_back", &CudaFeedback::send_back, WithoutLock())
      .def_property_readonly("device", &CudaFeedback::device);
  py::class_<Gpu>(m, "Gpu")
      .def(py::init<shared_ptr<Communicator>, shared_ptr<Communicator>, int, CudaMessages&>(),
           py::arg("users"), py::arg("shadow"), py::arg("device"), py::arg("messages"),
           WithoutLock())
      .def("run", &Gpu::run, py::arg("request"), py::arg("feedback").none(true), py::arg("stream"),
           py::arg("timeout"), WithoutLock())
      .def("finish", &Gpu::finish, py::arg("timeout"), WithoutLock())
      .def("should_stop", &Gpu::should_stop, WithoutLock())
      .def("should_resize", &Gpu::should_resize, WithoutLock())
      .def("set_model", &Gpu::set_model, py::arg("model"))
      .def("close", &Gpu::close, WithoutLock())
      .def("abort", &Gpu::abort, py::arg("reason"), WithoutLock())
      .def("require_alive", &Gpu::require_alive, WithoutLock())
      .def("require_success", &Gpu::require_success, WithoutLock())
      .def_property_readonly("sent", &Gpu::sent)
      .def_property_readonly("messages", &Gpu::messages);
  m.def("gpu_model", &cuda::gpu_model);
  m.def("cuda_is_captured", &is_captured, py::arg("device"), py::arg("stream"));
  m.def("cuda_device_of", &device_of, py::arg("address"));
  m.def("cuda_device_identity", &device_identity, py::arg("device"));
}

}  // namespace gradwire::bind
