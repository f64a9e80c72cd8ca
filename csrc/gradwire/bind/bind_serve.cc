#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/base/fork.h"
#include "gradwire/bind/communicator_handle.h"
#include "gradwire/bind/module.h"
#include "gradwire/serve/client/client.h"
#include "gradwire/serve/server/server.h"

// A namespace of its own, since several of these files are compiled as one.
namespace gradwire::bind::serving {
namespace {

using namespace serve;
using std::shared_ptr;
using WithoutLock = py::call_guard<Unlocked>;
using Context = shared_ptr<transport::TransportContext>;
using Addresses = std::vector<std::pair<std::uintptr_t, std::uint64_t>>;
using Parameters = std::vector<std::pair<std::string, std::vector<std::uint64_t>>>;

WaitLimit limit_of(double timeout) { return {Deadline::after(timeout), check_signals}; }

// What only the process that made it may use: a fork has none of its threads. There it is leaked,
// since its end would touch what the two processes share.
template <typename Owned>
class OwnedHere {
 public:
  explicit OwnedHere(std::unique_ptr<Owned> owned) : owned_(std::move(owned)) {}
  OwnedHere(OwnedHere&&) noexcept = default;
  OwnedHere& operator=(OwnedHere&&) = delete;
  ~OwnedHere() {
    if (made_after_ != forks()) static_cast<void>(owned_.release());
  }
  Owned& get() const {
    if (made_after_ != forks())
      throw Aborted("it belongs to another process, of which this one is a fork");
    if (!owned_) throw InvalidArgument("it was handed on");
    return *owned_;
  }
  std::unique_ptr<Owned> take() {
    get();
    return std::move(owned_);
  }

 private:
  const std::uint32_t made_after_ = forks();
  std::unique_ptr<Owned> owned_;
};

using ServeChannel = OwnedHere<Channel>;
using ServeServer = OwnedHere<Server>;

// Holds the memory of calls that are not over, which the client's thread reads and writes: so it is
// declared first, and released last.
struct ServeClient {
  std::vector<std::pair<shared_ptr<ClientCall>, py::object>> held{};
  OwnedHere<Client> client;

  Client& get() const { return client.get(); }
  shared_ptr<ClientCall> keep(shared_ptr<ClientCall> call, py::object memory) {
    std::erase_if(held, [](const auto& each) { return each.first->work().done(); });
    held.emplace_back(call, std::move(memory));
    return call;
  }
};

// A method that takes a WaitLimit, as one that takes seconds.
template <typename Handle, auto kMethod>
constexpr auto within =
    [](Handle& self, double timeout) { return (self.get().*kMethod)(limit_of(timeout)); };

template <typename Spans, typename Float>
Spans spans_of(const Addresses& addresses) {
  Spans spans;
  for (const auto& [address, count] : addresses)
    spans.emplace_back(reinterpret_cast<Float*>(address), count);
  return spans;
}

std::string table_text(const Parameters& parameters, const std::string& rule,
                       const std::vector<std::string>& codecs, std::uint32_t shards,
                       bool atomic_push, bool divide, std::optional<std::uint64_t> max_staleness,
                       const std::string& dtype) {
  ParameterTable table;
  table.dtype = dtype == name_of(DType::kFloat64) ? DType::kFloat64 : DType::kFloat32;
  for (const auto& [name, shape] : parameters) table.parameters.push_back({name, shape});
  table.rule = make_rule(rule).name;
  for (const std::string& each : codecs)
    if (const std::string name = codec::make_codec(each)->name();
        std::ranges::find(table.codecs, name) == table.codecs.end())
      table.codecs.push_back(name);
  table.shards = shards;
  table.atomic_push = atomic_push;
  table.divide = divide;
  if (max_staleness) table.max_staleness = *max_staleness;
  table.check();
  return table.text();
}

// Hands the values over without a copy.
py::array_t<float> array_of(std::vector<float> values) {
  auto owned = std::make_unique<std::vector<float>>(std::move(values));
  std::vector<float>& kept = *owned;
  const py::capsule owner(owned.release(),
                          [](void* vector) { delete static_cast<std::vector<float>*>(vector); });
  return py::array_t<float>(static_cast<py::ssize_t>(kept.size()), kept.data(), owner);
}

py::dict dict_of(Snapshot snapshot) {
  py::dict slots;
  for (auto& slot : snapshot.arrays) slots[py::str(slot.name)] = array_of(std::move(slot.values));
  return py::dict(py::arg("table") = snapshot.table, py::arg("shard") = snapshot.shard,
                  py::arg("version") = snapshot.version, py::arg("steps") = snapshot.steps,
                  py::arg("slots") = slots);
}

using Slots = std::vector<std::pair<std::string, py::array_t<float, py::array::c_style>>>;

Snapshot snapshot_of(std::string table, std::uint32_t shard, std::uint64_t version,
                     std::vector<std::uint64_t> steps, const Slots& slots) {
  Snapshot snapshot{std::move(table), shard, version, std::move(steps), {}};
  for (const auto& [name, values] : slots)
    snapshot.arrays.push_back({name, {values.data(), values.data() + values.size()}});
  return snapshot;
}

std::unique_ptr<ServeServer> started(std::unique_ptr<Server> server) {
  server->start();
  return std::make_unique<ServeServer>(std::move(server));
}

Server::Options options_of(std::uint32_t shard, std::uint32_t shards, bool log) {
  return {shard, shards, log ? Log(log_to_stderr) : Log()};
}

void admit(ServeServer& self, const std::string& transport, Context context, int fd,
           std::shared_ptr<crypto::Seal> seal, const std::string& name, ClientId client,
           double timeout) {
  transport::Connection connection(UniqueFd(fd), std::move(seal));
  self.get().admit(Channel::make(End::kServer, transport, std::move(context), std::move(connection),
                                 name, limit_of(timeout)),
                   client);
}

void bind_server(py::module_& m) {
  py::class_<ServeServer>(m, "ServeServer")
      .def(py::init([](std::uint32_t shard, std::uint32_t shards, bool log) {
             return started(std::make_unique<Server>(options_of(shard, shards, log)));
           }),
           py::arg("shard"), py::arg("shards"), py::arg("log") = true)
      .def_static(
          "restored",
          [](const std::string& table, std::uint32_t shard, std::uint64_t version,
             std::vector<std::uint64_t> steps, const Slots& slots, bool log) {
            const auto shards = ParameterTable::parse(table).shards;
            return started(std::make_unique<Server>(
                options_of(shard, shards, log),
                snapshot_of(table, shard, version, std::move(steps), slots)));
          },
          py::arg("table"), py::arg("shard"), py::arg("version"), py::arg("steps"),
          py::arg("slots"), py::arg("log") = true)
      .def("admit", &admit, WithoutLock())
      .def("snapshot",
           [](ServeServer& self, double timeout) {
             Snapshot snapshot;
             {
               const Unlocked unlocked;
               snapshot = self.get().snapshot(limit_of(timeout));
             }
             return dict_of(std::move(snapshot));
           })
      .def("snapshot_wanted", on<ServeServer, &Server::snapshot_wanted, double>, WithoutLock())
      .def("snapshot_written",
           on<ServeServer, &Server::snapshot_written, std::uint64_t, const std::string&>)
      .def("statistics", within<ServeServer, &Server::statistics>, WithoutLock())
      .def(
          "census",
          [](ServeServer& self, double timeout) {
            const Server::Census census = self.get().census(limit_of(timeout));
            return std::tuple(census.joined, census.admitted, census.has_values);
          },
          WithoutLock())
      .def("stop", on<ServeServer, &Server::stop>, WithoutLock());
}

Op parse_question(const std::string& name) {
  for (const Op op : {Op::kWait, Op::kStats, Op::kSnapshot})
    if (name == name_of(op)) return op;
  throw InvalidArgument("'" + name + "' is nothing to ask: wait, stats, snapshot");
}

using Staged = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>;
using Pushes = std::vector<std::pair<std::uint64_t, std::uint64_t>>;

// Makes a command of its name and its fields, as _core.pyi lists them.
Command command_of(const py::tuple& given) {
  const auto kind = given[0].cast<std::string>();
  const auto text = [&](std::size_t i) { return given[i].cast<std::string>(); };
  if (kind == "dots") return command::Dots{given[1].cast<decltype(command::Dots::pairs)>()};
  if (kind == "absmax") return command::Absmax{text(1)};
  if (kind == "abssum") return command::Abssum{text(1)};
  if (kind == "combine")
    return command::WeightedSum{text(1), given[2].cast<decltype(command::WeightedSum::terms)>()};
  if (kind == "copy") return command::CopyVector{text(1), text(2)};
  if (kind == "drop") return command::Drop{text(1)};
  if (kind == "names") return command::ListNames{};
  if (kind == "discard") {
    const auto batch = given[1].cast<std::optional<std::uint64_t>>();
    return command::Discard{!batch, batch.value_or(0)};
  }
  if (kind != "fold") throw InvalidArgument("there is no command '" + kind + "'");
  command::FoldPushes fold{text(1), given[2].cast<std::uint64_t>()};
  for (const auto& [replica, sequence] : given[3].cast<Pushes>())
    fold.pushes.push_back({replica, sequence});
  return fold;
}

// Returns for each shard, for each command, its numbers and its names.
auto results_of(const ClientCall& call) {
  using Pair = std::pair<std::vector<std::vector<double>>, std::vector<std::string>>;
  std::vector<std::vector<Pair>> out;
  for (const auto& shard : call.results()) {
    auto& results = out.emplace_back();
    for (const CommandResult& each : shard) results.emplace_back(each.numbers, each.names);
  }
  return out;
}

shared_ptr<ClientCall> push(ServeClient& self, const Addresses& gradients,
                            std::vector<std::string> codecs,
                            shared_ptr<codec::ErrorFeedback> feedback, float rate, bool strict,
                            double timeout, py::object memory, std::vector<std::uint64_t> versions,
                            const std::optional<Staged>& staged) {
  shared_ptr<ClientCall> call;
  {
    const Unlocked unlocked;
    const WaitLimit limit = limit_of(timeout);
    const bool one = codecs.size() == 1;
    PushOptions options{.codec = one ? codecs.front() : "none",
                        .codecs = one ? std::vector<std::string>() : std::move(codecs),
                        .feedback = std::move(feedback),
                        .rate = rate,
                        .strict = strict,
                        .versions = std::move(versions)};
    if (staged) {
      const auto [batch, replica, sequence] = *staged;
      options.staged = {batch, {replica, sequence}};
    }
    call = self.get().push(spans_of<Gradients, const float>(gradients), options, limit,
                           Deadline::after(timeout));
  }
  return call->copied() ? call : self.keep(std::move(call), std::move(memory));
}

// Returns whether the call was over within `seconds`.
bool wait(ServeClient& self, const ClientCall& call, double seconds) {
  self.get();  // throws in a fork, where no thread would end the call
  const Unlocked unlocked;
  const WaitLimit limit = limit_of(seconds);
  while (!call.work().wait_for(1e-3 * limit.turn_milliseconds())) {
    limit.check_interrupt();
    if (limit.passed()) return false;
  }
  call.work().rethrow();
  return true;
}

std::unique_ptr<ServeClient> make_client(const std::string& table, ClientId id,
                                         const std::vector<ServeChannel*>& shards) {
  std::vector<std::unique_ptr<Channel>> channels;
  for (ServeChannel* each : shards) channels.push_back(each->take());
  auto client = std::make_unique<Client>(ParameterTable::parse(table), id, std::move(channels));
  client->start();
  return std::make_unique<ServeClient>(ServeClient{.client = OwnedHere(std::move(client))});
}

void bind_client(py::module_& m) {
  py::class_<ClientCall, shared_ptr<ClientCall>>(m, "ServeCall")
      .def("done", [](const ClientCall& self) { return self.work().done(); })
      .def("texts", &ClientCall::texts)
      .def("results", &results_of)
      .def("versions", &ClientCall::versions)
      .def("refusals", &ClientCall::refusals)
      .def("copied", &ClientCall::copied);
  py::class_<ServeClient>(m, "ServeClient")
      .def(py::init(&make_client))
      .def(
          "join",
          [](ServeClient& self, double timeout, bool coordinator) {
            return self.get().join(Deadline::after(timeout),
                                   coordinator ? ClientRole::kCoordinator : ClientRole::kReplica);
          },
          py::arg("timeout"), py::arg("coordinator") = false)
      .def("set",
           [](ServeClient& self, const Addresses& values, double timeout, py::object memory) {
             return self.keep(
                 self.get().set(spans_of<Gradients, const float>(values), Deadline::after(timeout)),
                 std::move(memory));
           })
      .def("push", &push, py::arg("gradients"), py::arg("codecs"), py::arg("feedback"),
           py::arg("rate"), py::arg("strict"), py::arg("timeout"), py::arg("memory"),
           py::arg("versions") = std::vector<std::uint64_t>(), py::arg("staged") = py::none())
      .def("pull",
           [](ServeClient& self, const Addresses& values, const std::string& codec, double timeout,
              py::object memory) {
             return self.keep(
                 self.get().pull(spans_of<Values, float>(values), codec, Deadline::after(timeout)),
                 std::move(memory));
           })
      .def("ask",
           [](ServeClient& self, const std::string& what, std::uint64_t version, double timeout) {
             return self.get().ask(parse_question(what), version, Deadline::after(timeout));
           })
      .def("command",
           [](ServeClient& self, const std::vector<py::tuple>& commands, double timeout) {
             std::vector<Command> given;
             for (const py::tuple& each : commands) given.push_back(command_of(each));
             return self.get().ask(given, Deadline::after(timeout));
           })
      .def("wait", &wait)
      .def("versions", on<ServeClient, &Client::versions>)
      .def("merged", on<ServeClient, &Client::merged>)
      .def("stale", on<ServeClient, &Client::stale>)
      .def("close", within<ServeClient, &Client::close>, WithoutLock());
}

void bind_all(py::module_& m) {
  m.attr("SERVE_NO_VERSION") = kNoVersion;
  m.attr("SERVE_REPLACED") = kReplaced;
  m.def("serve_table", &table_text, py::arg("parameters"), py::arg("rule"), py::arg("codecs"),
        py::arg("shards"), py::arg("atomic_push"), py::arg("divide"), py::arg("max_staleness"),
        py::arg("dtype") = "float32");
  py::class_<ServeChannel>(m, "ServeChannel")
      .def(py::init([](const std::string& transport, Context context, int fd,
                       std::shared_ptr<crypto::Seal> seal, const std::string& peer,
                       double timeout) {
        transport::Connection connection(UniqueFd(fd), std::move(seal));
        const Unlocked unlocked;
        return std::make_unique<ServeChannel>(
            ServeChannel{OwnedHere(Channel::make(End::kClient, transport, std::move(context),
                                                 std::move(connection), peer, limit_of(timeout)))});
      }));
  bind_server(m);
  bind_client(m);
}

}  // namespace
}  // namespace gradwire::bind::serving

namespace gradwire::bind {
void bind_serve(py::module_& m) { serving::bind_all(m); }
}  // namespace gradwire::bind
