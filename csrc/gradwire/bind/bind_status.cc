#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "gradwire/bind/module.h"
#include "gradwire/exec/control/status_scan.h"

namespace gradwire::bind {
namespace {

const char* name_of(exec::Activity activity) {
  using exec::Activity;
  return activity == Activity::kCall      ? "call"
         : activity == Activity::kSend    ? "send"
         : activity == Activity::kReceive ? "receive"
         : activity == Activity::kFailed  ? "failed"
                                          : "outside";
}

py::dict as_dict(const exec::RankStatus& rank) {
  const exec::StatusPage& page = rank.page;
  return py::dict(py::arg("pid") = rank.pid, py::arg("state") = std::string(1, rank.state),
                  py::arg("job") = page.job.data(), py::arg("tag") = page.tag,
                  py::arg("communicator") = page.communicator, py::arg("rank") = page.rank,
                  py::arg("size") = page.size, py::arg("local_size") = page.local_size,
                  py::arg("about") = page.about.data(),
                  py::arg("activity") = name_of(page.activity()),
                  py::arg("seconds") = rank.seconds(), py::arg("calls") = page.current.calls,
                  py::arg("operation") = exec::operation_of(page), py::arg("spec") = page.spec(),
                  py::arg("peer") = page.peer(), py::arg("sentence") = exec::describe(rank));
}

std::vector<py::dict> ranks_on_this_host() {
  std::vector<exec::RankStatus> found;
  {
    const py::gil_scoped_release unlocked;
    found = exec::ranks_on_this_host();
  }
  std::vector<py::dict> out;
  for (const exec::RankStatus& each : found) out.push_back(as_dict(each));
  return out;
}

}  // namespace

void bind_status(py::module_& m) { m.def("ranks_on_this_host", &ranks_on_this_host); }

}  // namespace gradwire::bind
