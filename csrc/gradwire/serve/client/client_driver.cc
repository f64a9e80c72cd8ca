// What the client's thread does: it starts calls, sends and receives their frames; client_ends.cc
// has how they end.
#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/codec/simd/simd.h"
#include "gradwire/serve/client/client.h"
#include "gradwire/serve/shard/shard.h"

namespace gradwire::serve {
namespace {

// After a small request another one is likely soon, and must not wait behind many frames of a push:
// so the next kLimitedFrames frames to that shard go out with at most kFewUnread unread.
constexpr int kLimitedFrames = 64;
constexpr int kFewUnread = 2;

}  // namespace

void Client::run() {
  const codec::FloatEnvironment environment;
  while (true) {
    {
      const std::lock_guard lock(mutex_);
      if (closing_) return;
    }
    try {
      pass();
    } catch (const std::exception&) {  // no memory, say
      fail(std::current_exception());
    }
    poller_.wait(earliest());
  }
}

bool Client::turn() {
  poller_.wait(Deadline::at_once());
  return pass();
}

bool Client::pass() {
  bool moved = take_submitted();
  moved = submit_merged() || moved;
  moved = poller_.round() || moved;
  look_for_ends();
  expire();
  give_back_refused();
  return moved;
}

// Ends all calls, and tells the servers that this is no failure.
void Client::say_goodbye(const WaitLimit& limit) {
  const codec::FloatEnvironment environment;
  fail(std::make_exception_ptr(Aborted("the client of the parameter server was closed")));
  for (ShardLink& link : links_) {
    MessageHeader goodbye;
    goodbye.client = id_;
    goodbye.table = mark_;
    link.channel->post(goodbye);
    link.channel->send_queued();
    while (!(link.channel->flush() && link.channel->queued() == 0) && !limit.passed()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      link.channel->send_queued();
    }
    poller_.remove(*link.channel);
    link.channel->end("it was closed");
  }
}

bool Client::take_submitted() {
  std::vector<std::shared_ptr<ClientCall>> calls;
  {
    const std::lock_guard lock(mutex_);
    calls.swap(submitted_);
  }
  for (const auto& call : calls) start_call(call);
  return !calls.empty();
}

// Sends the merged pushes when an acknowledgement has made room. A thread that holds the lock, to
// add to them, wakes this one afterwards.
bool Client::submit_merged() {
  const std::unique_lock merging(merge_mutex_, std::try_to_lock);
  if (!merging || !merged_.call) return false;
  {
    const std::lock_guard lock(mutex_);
    if (unacknowledged_ >= kMostUnacknowledged) return false;
    ++unacknowledged_;
  }
  start_call(std::exchange(merged_, {}).call);
  return true;
}

void Client::start_call(const std::shared_ptr<ClientCall>& call) {
  call->sequence_ = next_sequence_++;
  open_.push_back(call);
  if (call->outgoing_) outgoing_.push_back(call);
  for (ShardLink& link : links_) {
    poller_.resume(*link.channel);
    if (call->op_ == Op::kPull) {
      link.pulls.push_back(call);
      const bool differences = pulls_differences(*codecs_[call->codec_]);
      request(link, *call, differences && link.has_mirror ? 1 : 0);
      link.has_mirror = link.has_mirror || differences;
    } else if (call->op_ == Op::kJoin) {
      join(link, call);
    } else if (!call->outgoing_) {
      link.waiting[call->sequence_] = call;
      request(link, *call);
    }
  }
}

MessageHeader Client::header_of(const ClientCall& call) const {
  MessageHeader header;
  header.op = call.op_;
  header.codec = call.codec_;
  header.client = id_;
  header.sequence = call.sequence_;
  header.table = mark_;
  header.version = call.version_;
  return header;
}

void Client::request(ShardLink& link, const ClientCall& call, std::uint32_t extra) {
  MessageHeader header = header_of(call);
  header.extra = extra;
  link.channel->post(header, call.payload_);
  link.limited_frames = kLimitedFrames;
}

// Sends the table, in as many frames as it takes.
void Client::join(ShardLink& link, const std::shared_ptr<ClientCall>& call) {
  const std::string text = table_.text();
  MessageHeader header = header_of(*call);
  header.table = 0;
  header.extra = static_cast<std::uint32_t>(index_of(link));
  header.first = static_cast<std::uint64_t>(call->role_);
  for (std::size_t at = 0; at < text.size(); at += kMostPayload) {
    const std::string_view part = std::string_view(text).substr(at, kMostPayload);
    header.flags = flags_of(at / kMostPayload, (text.size() + kMostPayload - 1) / kMostPayload);
    link.channel->post(header, std::as_bytes(std::span(part)));
  }
  link.waiting[call->sequence_] = call;
}

std::size_t Client::index_of(const ShardLink& link) const {
  return static_cast<std::size_t>(&link - links_.data());
}

bool Client::serve(Channel& channel) {
  ShardLink& link = *by_channel_.at(&channel);
  bool moved = channel.send_queued();
  moved = send_frame(link) || moved;
  moved = take_message(link) || moved;
  channel.flush();
  return moved;
}

// Sends the next frame of the push, or the initial values, that all shards are at.
bool Client::send_frame(ShardLink& link) {
  if (outgoing_.empty() || !open_outgoing()) return false;
  const std::shared_ptr<ClientCall> call = outgoing_.front();
  const auto& frames = link.layout.frames();
  if (link.next >= frames.size()) return false;
  const Bytes room = link.channel->room(link.limited_frames > 0 ? kFewUnread : kWindow);
  if (room.empty()) return false;
  if (link.limited_frames > 0) --link.limited_frames;
  const ShardFrame& frame = frames[link.next];
  const bool last = link.next + 1 == frames.size();
  MessageHeader header = header_of(*call);
  header.flags = 0;
  link.layout.describe(link.next, header);
  header.codec = call->outgoing_->codec_of(link.layout, frame);
  header.version = call->versions_[index_of(link)];
  header.extra = std::bit_cast<std::uint32_t>(call->rate_);
  const std::size_t named = link.next == 0 ? call->payload_.size() : 0;
  std::ranges::copy(ConstBytes(call->payload_).first(named), room.begin());
  const std::size_t bytes = named + call->outgoing_->encode(link.layout, frame, room.subspan(named),
                                                            link.channel->copy());
  header.length = static_cast<std::uint32_t>(bytes);
  remember(link, *call, ConstBytes(room).first(bytes));
  if (last) link.waiting[call->sequence_] = call;
  ++link.next;
  link.channel->send(header);
  if (last && std::ranges::all_of(links_, [](const ShardLink& each) {
        return each.next == each.layout.frames().size();
      }))
    next_outgoing();
  return true;
}

// Opens the residuals of the push that is to be sent next. Where they are in use, that push fails.
bool Client::open_outgoing() {
  if (opened_) return true;
  give_back_refused();
  const std::shared_ptr<ClientCall> call = outgoing_.front();
  try {
    call->outgoing_->open();
    opened_ = true;
  } catch (const InvalidArgument&) {
    outgoing_.pop_front();
    finish(call, std::current_exception());
  }
  return opened_;
}

// Keeps a payload for as long as a shard may refuse it.
void Client::remember(ShardLink& link, ClientCall& call, ConstBytes payload) {
  const bool refusable = table_.max_staleness != std::numeric_limits<std::uint64_t>::max();
  if (!refusable || !call.feedback_) return;
  call.sent_.resize(links_.size());
  call.sent_[index_of(link)].emplace_back(payload.begin(), payload.end());
}

// Goes on with the next push. Frames of this one that shards did not get, or drop as incomplete, go
// into the residuals.
void Client::next_outgoing() {
  Outgoing& outgoing = *outgoing_.front()->outgoing_;
  for (ShardLink& link : links_) {
    const auto& frames = link.layout.frames();
    if (std::exchange(link.next, 0) < frames.size())
      for (const ShardFrame& frame : frames) outgoing.keep(link.layout, frame);
    poller_.resume(*link.channel);
  }
  outgoing.close();
  opened_ = false;
  outgoing_.pop_front();
}

bool Client::take_message(ShardLink& link) {
  const auto message = link.channel->next();
  if (!message) return false;
  try {
    handle(link, *message);
  } catch (const InvalidArgument& error) {
    link.channel->end(error.what());
  }
  link.channel->release();
  return true;
}

void Client::handle(ShardLink& link, const ServeMessage& message) {
  const MessageHeader& header = message.header;
  if (!header.has(kReply)) throw InvalidArgument("the server sent a request");
  if (header.op == Op::kBye)
    return link.channel->end(message.payload.empty() ? "the server was stopped"
                                                     : std::string(text_of(message.payload)));
  if (header.op == Op::kPull)
    return header.has(kRefused) ? take_refused_pull(link, message) : take_values(link, message);
  const auto found = link.waiting.find(header.sequence);
  if (found == link.waiting.end()) return;  // of a call that has timed out
  const std::shared_ptr<ClientCall> call = found->second;
  if (call->op_ != header.op) throw InvalidArgument("a reply is to another request");
  link.waiting.erase(found);
  if (header.has(kRefused)) refused(link, *call, message);
  if (!header.has(kRefused) && header.op == Op::kSet) note_version(link, header.version);
  call->texts_[index_of(link)] = text_of(message.payload);
  call->versions_[index_of(link)] = header.version;
  answered(link, call);
}

void Client::note_version(const ShardLink& link, std::uint64_t version) {
  const std::lock_guard lock(mutex_);
  versions_[index_of(link)] = version;
}

void Client::answered(const ShardLink& link, const std::shared_ptr<ClientCall>& call) {
  call->answered_[index_of(link)] = true;
  if (std::ranges::find(call->answered_, false) != call->answered_.end()) return;
  if (call->gives_back_)
    returning_.push_back(call);
  else
    finish(call, call->error_);
}

// A push that is too stale and initial values that are not the first are no errors.
void Client::refused(ShardLink& link, ClientCall& call, const ServeMessage& reply) {
  ++call.refusals_;
  const auto why = static_cast<Refusal>(reply.header.count);
  if (why == Refusal::kHasValues) return;
  if (why == Refusal::kStale) {
    {
      const std::lock_guard lock(mutex_);
      ++counts_.stale;
    }
    const std::size_t shard = index_of(link);
    if (call.sent_.empty()) return;
    for (std::size_t i = 0; i < call.sent_[shard].size(); ++i)
      call.outgoing_->give_back(link.layout, link.layout.frames()[i], call.sent_[shard][i]);
    call.gives_back_ = true;
    return;
  }
  const std::string text = link.channel->peer() + " refused " + std::string(name_of(call.op_)) +
                           ": " + std::string(text_of(reply.payload));
  if (!call.error_) call.error_ = std::make_exception_ptr(InvalidArgument(text));
}

// Returns refused payloads to the residuals, as soon as no push has these open.
void Client::give_back_refused() {
  if (opened_) return;
  for (const auto& call : std::exchange(returning_, {})) {
    std::exception_ptr error = call->error_;
    try {
      call->outgoing_->finish_giving_back();
    } catch (const InvalidArgument&) {
      error = std::current_exception();
    }
    finish(call, error);
  }
}

// Takes a frame of the pull that this shard answers.
void Client::take_values(ShardLink& link, const ServeMessage& message) {
  const MessageHeader& header = message.header;
  const auto& frames = link.layout.frames();
  if (link.pulls.empty() || header.sequence != link.pulls.front()->sequence_)
    throw InvalidArgument("values came that were not pulled");
  const std::shared_ptr<ClientCall> call = link.pulls.front();
  const ShardFrame& frame = frames[link.pulled];
  const bool dense = header.codec == 0 && pulls_differences(*codecs_[call->codec_]);
  if (!link.layout.is_described(link.pulled, header) || (header.codec != call->codec_ && !dense))
    throw InvalidArgument("values came that are not the next ones of a pull");
  install(link, frame, message, *call, dense);
  if (link.pulled == 0) link.pulled_version = header.version;
  link.pulled_version = std::min(link.pulled_version, header.version);
  ++link.pulled;
  if (!header.has(kLast)) return;
  link.pulled = 0;
  link.pulls.pop_front();
  if (call->over_) return;
  note_version(link, link.pulled_version);
  call->versions_[index_of(link)] = link.pulled_version;
  answered(link, call);
}

// A coordinator has no access to values.
void Client::take_refused_pull(ShardLink& link, const ServeMessage& message) {
  if (link.pulls.empty() || link.pulled > 0 ||
      message.header.sequence != link.pulls.front()->sequence_)
    throw InvalidArgument("a refusal came of a pull that was not asked for");
  const std::shared_ptr<ClientCall> call = link.pulls.front();
  link.pulls.pop_front();
  if (call->over_) return;
  refused(link, *call, message);
  answered(link, call);
}

// Differences are added to the mirror even where nobody waits for them any more: the server assumes
// that they are.
void Client::install(ShardLink& link, const ShardFrame& frame, const ServeMessage& message,
                     const ClientCall& call, bool dense) {
  const codec::Codec& codec = *codecs_[message.header.codec];
  const bool differences = pulls_differences(*codecs_[call.codec_]);
  float* mirror = nullptr;
  if (differences) {
    link.mirror.resize(link.layout.elements());
    mirror = link.mirror.data() + frame.first;
    decode_frame(codecs_, message.header.codec, link.layout, frame, message.payload,
                 /*add=*/!dense, mirror);
  }
  if (call.over_) return;
  ConstBytes rest = message.payload;
  for (const ParameterSpan& span : link.layout.spans(frame)) {
    const std::size_t words = link.layout.words();
    float* const to = call.values_[span.parameter].data() + span.offset * words;
    const std::size_t plain = span.count * words * sizeof(float);
    if (differences) {
      std::memcpy(to, mirror + (span.first - frame.first), plain);
    } else if (message.header.codec == 0 && rest.size() >= plain) {
      // decode() would also look whether all are finite.
      install_(reinterpret_cast<std::byte*>(to), rest.data(), plain);
      rest = rest.subspan(plain);
    } else {
      rest = rest.subspan(codec.decode(rest, to, span.count).bytes);
    }
  }
  if (!differences && !rest.empty())
    throw InvalidArgument("a frame's payload is longer than its elements");
}

}  // namespace gradwire::serve
