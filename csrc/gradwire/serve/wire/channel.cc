#include "gradwire/serve/wire/channel.h"

#include <cstring>

#include "gradwire/base/error.h"

namespace gradwire::serve {
namespace {

constexpr int kEnds = 2;

// Returns an error's text without the ranks of the pair, which mean nothing to a reader.
std::string without_ranks(const std::string& text, Rank peer) {
  const std::string link = " link to rank " + std::to_string(peer) + ": ";
  const std::size_t at = text.find(link);
  return at == std::string::npos ? text : text.substr(at + link.size());
}

}  // namespace

transport::LinkOptions channel_options(End end,
                                       std::shared_ptr<transport::TransportContext> context) {
  transport::LinkOptions options;
  options.rank = static_cast<Rank>(end);
  options.size = kEnds;
  options.messages = kWindow;
  options.messages_per_peer = kWindow;
  options.context = std::move(context);
  return options;
}

Channel::Channel(std::unique_ptr<transport::Transport> transport, std::string peer)
    : transport_(std::move(transport)), peer_(std::move(peer)), rank_(transport_->peers().at(0)) {}

std::unique_ptr<Channel> Channel::make(End end, std::string_view transport,
                                       std::shared_ptr<transport::TransportContext> context,
                                       transport::Connection connection, std::string peer,
                                       const WaitLimit& wait_limit) {
  auto made = make_transport(transport, channel_options(end, std::move(context)));
  const Rank other = 1 - static_cast<Rank>(end);
  const auto named = [&](const Error& error) {
    return peer + ": " + without_ranks(error.what(), other);
  };
  try {
    made->offer(std::move(connection), other);
    made->complete(wait_limit);
  } catch (const Timeout& error) {
    throw Timeout(named(error), kNoPeer);
  } catch (const TransportError& error) {
    throw TransportError(named(error), kNoPeer);
  }
  return std::make_unique<Channel>(std::move(made), std::move(peer));
}

// Returns what `body` returns, or a value of that type made of nothing where the channel has ended
// or does so here.
template <typename Body>
std::invoke_result_t<Body> Channel::guarded(Body body) {
  try {
    if (!ended_) return body();
  } catch (const TransportError& error) {
    end(without_ranks(error.what(), rank_));
  }
  return std::invoke_result_t<Body>();
}

void Channel::post(MessageHeader header, ConstBytes payload) {
  if (ended_) return;
  header.length = static_cast<std::uint32_t>(payload.size());
  std::vector<std::byte>& message = queue_.emplace_back(sizeof header + payload.size());
  std::memcpy(message.data(), &header, sizeof header);
  if (!payload.empty()) std::memcpy(message.data() + sizeof header, payload.data(), payload.size());
}

bool Channel::send_queued() {
  open_ = {};
  bool sent = false;
  transport_->limit_unread(kWindow);
  while (!ended_ && !queue_.empty()) {
    const std::vector<std::byte>& message = queue_.front();
    const bool posted = guarded([&] {
      const Bytes room = transport_->reserve(std::span(&rank_, 1), message.size());
      if (room.data() == nullptr) return false;
      std::memcpy(room.data(), message.data(), message.size());
      transport_->commit(message.size());
      return true;
    });
    if (!posted) break;
    queue_.pop_front();
    sent = true;
  }
  return sent;
}

Bytes Channel::room(int most) {
  open_ = {};
  if (!queue_.empty()) return {};
  transport_->limit_unread(most);
  open_ = guarded([&] {
    return transport_->reserve(std::span(&rank_, 1), sizeof(MessageHeader) + kMostPayload);
  });
  return open_.data() == nullptr ? Bytes{} : open_.subspan(sizeof(MessageHeader));
}

void Channel::send(const MessageHeader& header) {
  std::memcpy(open_.data(), &header, sizeof header);
  open_ = {};
  guarded([&] { transport_->commit(sizeof header + header.length); });
}

std::optional<ServeMessage> Channel::next() {
  return guarded([&]() -> std::optional<ServeMessage> {
    const auto frame = transport_->peek(rank_);
    if (!frame) return std::nullopt;
    try {
      return parse(*frame);
    } catch (const InvalidArgument& error) {
      end(error.what());
      return std::nullopt;
    }
  });
}

void Channel::release() {
  guarded([this] { transport_->release(rank_); });
}

void Channel::end(std::string why) {
  if (ended_) return;
  ended_ = true;
  why_ = std::move(why);
  queue_.clear();
  open_ = {};
}

bool Channel::flush() {
  if (ended_) return true;
  return guarded([this] { return transport_->flush(); });
}

void Channel::arm() {
  guarded([this] { transport_->arm(); });
}

void Channel::disarm() {
  guarded([this] { transport_->disarm(); });
}

}  // namespace gradwire::serve
