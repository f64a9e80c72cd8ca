#include <pybind11/stl.h>

#include "gradwire/bind/module.h"
#include "gradwire/transport/rdma/rdma_devices.h"

namespace gradwire::bind {

using transport::RdmaDevices;
using transport::RdmaPort;
using transport::RdmaSettings;

namespace {

template <typename Property>
std::vector<std::string> each_port(const RdmaDevices& devices, Property property) {
  std::vector<std::string> found;
  for (const RdmaPort& port : devices.ports()) found.push_back(property(port));
  return found;
}

}  // namespace

void bind_rdma(py::module_& m) {
  py::class_<RdmaDevices, std::shared_ptr<RdmaDevices>>(m, "RdmaDevices")
      .def(py::init([](std::string hca, std::string link_layer, int gid_index, int mtu,
                       int traffic_class, int service_level, int timeout, std::string library) {
             return std::make_shared<RdmaDevices>(
                 RdmaSettings{std::move(hca), std::move(link_layer), gid_index, mtu, traffic_class,
                              service_level, timeout, std::move(library)});
           }),
           py::arg("hca"), py::arg("link_layer"), py::arg("gid_index"), py::arg("mtu"),
           py::arg("traffic_class"), py::arg("service_level"), py::arg("timeout"),
           py::arg("library") = transport::Verbs::kLibrary)
      .def_property_readonly("ports",
                             [](const RdmaDevices& self) {
                               return each_port(self,
                                                [](const RdmaPort& p) { return p.describe(); });
                             })
      .def_property_readonly("networks",
                             [](const RdmaDevices& self) {
                               return each_port(
                                   self, [](const RdmaPort& p) { return p.address.network; });
                             })
      .def_property_readonly("link_layers", [](const RdmaDevices& self) {
        return each_port(self, [](const RdmaPort& p) {
          return std::string(transport::link_layer_name(p.address.link_layer));
        });
      });
}

}  // namespace gradwire::bind
