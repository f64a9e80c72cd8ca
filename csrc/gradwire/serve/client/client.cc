// What callers do; client_driver.cc and client_ends.cc have what the client's thread does.
#include "gradwire/serve/client/client.h"

#include <algorithm>
#include <cmath>

#include "gradwire/base/error.h"
#include "gradwire/codec/simd/simd.h"

namespace gradwire::serve {
namespace {

// Values of more bytes are copied past the cache, where they would evict each other.
constexpr std::uint64_t kCached = 16 << 20;

bool alike(const PushOptions& a, const PushOptions& b) {
  // A rate of 0 is the rule's own; -0 is a rate of zero.
  return a.codec == b.codec && a.codecs == b.codecs && a.feedback == b.feedback &&
         a.rate == b.rate && std::signbit(a.rate) == std::signbit(b.rate);
}

std::uint64_t bytes_of(const ParameterTable& table) {
  return table.elements() * table.words() * sizeof(float);
}

void add(std::span<const float> x, std::vector<float>& sum) {
  const auto& sums = codec::kernels().reduce[static_cast<std::size_t>(DType::kFloat32)];
  sums[static_cast<std::size_t>(ReduceOp::kSum)](sum.data(), x.data(), sum.size());
}

}  // namespace

Client::Client(ParameterTable table, ClientId id, std::vector<std::unique_ptr<Channel>> shards)
    : table_(std::move(table)),
      mark_(table_.mark()),
      id_(id),
      codecs_(codecs_of(table_)),
      install_(bytes_of(table_) > kCached ? copy_streaming : copy_cached),
      poller_([this](Channel& channel) { return serve(channel); }),
      versions_(shards.size(), kNoVersion) {
  table_.check();
  if (shards.size() != table_.shards)
    throw InvalidArgument(
        str_cat("there are channels to ", shards.size(), " shards, not ", table_.shards));
  for (std::size_t i = 0; i < shards.size(); ++i)
    links_.push_back(
        ShardLink{.channel = std::move(shards[i]),
                  .layout = ShardLayout(table_, codecs_, static_cast<std::uint32_t>(i))});
  for (ShardLink& link : links_) {
    by_channel_[link.channel.get()] = &link;
    poller_.add(*link.channel);
  }
}

Client::~Client() { close(Deadline::at_once()); }

void Client::start() {
  thread_ = std::thread([this] { run(); });
}

// Waits, for a while at most, until more pushes have ended than were `seen`.
void Client::await_acknowledgement(std::uint64_t seen, const WaitLimit& limit) {
  limit.check_interrupt();
  std::unique_lock lock(mutex_);
  acknowledged_.wait_for(lock, std::chrono::milliseconds(limit.turn_milliseconds()),
                         [&] { return acknowledgements_ != seen; });
}

// Without a thread there is nobody to wait for.
void Client::await_pushes(const WaitLimit& limit) {
  while (thread_.joinable() && !limit.passed()) {
    std::uint64_t seen = 0;
    {
      const std::lock_guard merging(merge_mutex_);
      const std::lock_guard lock(mutex_);
      if (failure_ || (unacknowledged_ == 0 && !merged_.call)) return;
      seen = acknowledgements_;
    }
    await_acknowledgement(seen, limit);
  }
}

void Client::close(const WaitLimit& limit) {
  await_pushes(limit);
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  poller_.wake();
  if (thread_.joinable()) thread_.join();
  say_goodbye(limit);
}

template <typename Arrays>
void Client::check_sizes(const Arrays& arrays) const {
  if (arrays.size() != table_.parameters.size())
    throw InvalidArgument(str_cat("there are ", table_.parameters.size(), " parameters, and ",
                                  arrays.size(), " arrays"));
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    const Parameter& parameter = table_.parameters[i];
    if (arrays[i].size() != parameter.elements() * table_.words())
      throw InvalidArgument(str_cat("parameter '", parameter.name, "' has ", parameter.elements(),
                                    " elements, its array has ",
                                    arrays[i].size() / table_.words()));
  }
}

std::shared_ptr<ClientCall> Client::make_call(Op op, Deadline deadline) const {
  auto call = std::make_shared<ClientCall>();
  call->op_ = op;
  call->deadline_ = deadline;
  call->answered_.resize(links_.size());
  call->texts_.resize(links_.size());
  call->versions_.resize(links_.size());
  return call;
}

std::shared_ptr<ClientCall> Client::submit(std::shared_ptr<ClientCall> call) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
    submitted_.push_back(call);
  }
  poller_.wake();
  return call;
}

std::shared_ptr<ClientCall> Client::join(Deadline deadline, ClientRole role) {
  auto call = make_call(Op::kJoin, deadline);
  call->role_ = role;
  return submit(std::move(call));
}

std::shared_ptr<ClientCall> Client::ask(Op op, std::uint64_t version, Deadline deadline) {
  auto call = make_call(op, deadline);
  call->version_ = version;
  return submit(std::move(call));
}

std::shared_ptr<ClientCall> Client::ask(std::span<const Command> commands, Deadline deadline) {
  auto call = make_call(Op::kAsk, deadline);
  call->payload_ = pack(commands);
  if (parse_commands(call->payload_).empty()) throw InvalidArgument("ask: there are no commands");
  if (call->payload_.size() > kMostPayload)
    throw InvalidArgument("ask: the commands are longer than a message: ask for fewer at a time");
  return submit(std::move(call));
}

std::vector<std::vector<CommandResult>> ClientCall::results() const {
  std::vector<std::vector<CommandResult>> results;
  for (const std::string& each : texts_)
    results.push_back(parse_results(std::as_bytes(std::span(each))));
  return results;
}

std::shared_ptr<ClientCall> Client::set(Gradients values, Deadline deadline) {
  check_sizes(values);
  auto call = make_call(Op::kSet, deadline);
  std::vector<std::uint8_t> plain(values.size());
  call->outgoing_ =
      std::make_unique<Outgoing>(table_, std::move(values), codecs_, std::move(plain), nullptr);
  return submit(std::move(call));
}

std::shared_ptr<ClientCall> Client::pull(Values values, const std::string& codec,
                                         Deadline deadline) {
  check_sizes(values);
  auto call = make_call(Op::kPull, deadline);
  call->codec_ = table_.index_of(codec);
  call->values_ = std::move(values);
  return submit(std::move(call));
}

void Client::prepare_push(ClientCall& call, Gradients gradients, const PushOptions& options) const {
  std::vector<std::uint8_t> choice(gradients.size());
  for (std::size_t i = 0; i < choice.size(); ++i)
    choice[i] = static_cast<std::uint8_t>(
        table_.index_of(options.codecs.empty() ? options.codec : options.codecs[i]));
  call.rate_ = options.rate;
  call.feedback_ = options.feedback;
  if (options.staged.has_value() != table_.staged())
    throw InvalidArgument(table_.staged() ? "push: the rule staged needs a name to keep it by"
                                          : "push: only the rule staged keeps pushes by names");
  if (options.feedback && table_.dtype != DType::kFloat32)
    throw InvalidArgument("push: error feedback is of float32");
  if (options.staged) {
    const ConstBytes name = std::as_bytes(std::span(&*options.staged, 1));
    call.payload_.assign(name.begin(), name.end());
  }
  call.outgoing_ = std::make_unique<Outgoing>(table_, std::move(gradients), codecs_,
                                              std::move(choice), options.feedback);
}

std::shared_ptr<ClientCall> Client::push(const Gradients& gradients, const PushOptions& options,
                                         const WaitLimit& limit, Deadline deadline) {
  check_sizes(gradients);
  if (!std::isfinite(options.rate)) throw InvalidArgument("push: the rate is not finite");
  if (!options.codecs.empty() && options.codecs.size() != gradients.size())
    throw InvalidArgument(str_cat("there are ", gradients.size(), " parameters, and ",
                                  options.codecs.size(), " codecs"));
  if (!options.versions.empty() && options.versions.size() != links_.size())
    throw InvalidArgument(str_cat("there are ", links_.size(), " shards, and ",
                                  options.versions.size(), " versions"));
  auto call = make_call(Op::kPush, deadline);
  prepare_push(*call, gradients, options);
  const bool waits = options.strict || table_.staged();
  while (true) {
    std::uint64_t seen = 0;
    {
      const std::lock_guard merging(merge_mutex_);
      {
        const std::lock_guard lock(mutex_);
        seen = acknowledgements_;
        if (failure_) std::rethrow_exception(failure_);
        if (!merged_.call && unacknowledged_ < kMostUnacknowledged) {
          ++unacknowledged_;
          call->versions_ = options.versions.empty() ? versions_ : options.versions;
          submitted_.push_back(call);
          break;
        }
      }
      if (!waits && merge(gradients, options, deadline, call)) break;
    }
    if (limit.passed()) throw Timeout("timed out: no push was acknowledged", kNoPeer);
    await_acknowledgement(seen, limit);
  }
  poller_.wake();
  return call;
}

// Adds a push to the one that waits to be sent, and makes `call` that one. Returns false where that
// one has other options. Called under merge_mutex_.
bool Client::merge(const Gradients& gradients, const PushOptions& options, Deadline deadline,
                   std::shared_ptr<ClientCall>& call) {
  const codec::FloatEnvironment environment;
  if (merged_.call && !alike(merged_.options, options)) return false;
  const bool first = !merged_.call;
  if (first) {
    for (const auto& each : gradients) call->sums_.emplace_back(each.begin(), each.end());
    prepare_push(*call, Gradients(call->sums_.begin(), call->sums_.end()), options);
    merged_ = {call, options};
  } else {
    call = merged_.call;
    for (std::size_t i = 0; i < gradients.size(); ++i) add(gradients[i], call->sums_[i]);
    call->deadline_ = std::max(call->deadline_, deadline);
  }
  const std::lock_guard lock(mutex_);
  ++counts_.merged;
  if (first) call->versions_ = options.versions.empty() ? versions_ : options.versions;
  return true;
}

std::vector<std::uint64_t> Client::versions() const {
  const std::lock_guard lock(mutex_);
  return versions_;
}

std::uint64_t Client::merged() const {
  const std::lock_guard lock(mutex_);
  return counts_.merged;
}

std::uint64_t Client::stale() const {
  const std::lock_guard lock(mutex_);
  return counts_.stale;
}

}  // namespace gradwire::serve
