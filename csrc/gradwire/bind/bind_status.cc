#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "gradwire/bind/module.h"
#include "gradwire/exec/control/status_scan.h"

namespace gradwire::bind {
namespace {

const char* name_of(exec::Activity activity) {
  switch (activity) {
    case exec::Activity::kCall:
      return "call";
    case exec::Activity::kSend:
      return "send";
    case exec::Activity::kReceive:
      return "receive";
    case exec::Activity::kFailed:
      return "failed";
    case exec::Activity::kOutside:
      break;
  }
  return "outside";
}

py::dict as_dict(const exec::RankStatus& rank) {
  const exec::StatusPage& page = rank.page;
  py::dict out;
  out["pid"] = rank.pid;
  out["state"] = std::string(1, rank.state);
  out["job"] = page.job.data();
  out["tag"] = page.tag;
  out["communicator"] = page.communicator;
  out["rank"] = page.rank;
  out["size"] = page.size;
  out["local_size"] = page.local_size;
  out["about"] = page.about.data();
  out["activity"] = name_of(page.activity());
  out["seconds"] = rank.seconds();
  out["calls"] = page.current.calls;
  out["operation"] = exec::operation_of(page);
  out["spec"] = page.spec();
  out["peer"] = page.peer();
  out["sentence"] = exec::describe(rank);
  return out;
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
