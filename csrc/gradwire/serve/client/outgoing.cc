#include "gradwire/serve/client/outgoing.h"

#include <algorithm>
#include <cmath>

#include "gradwire/base/error.h"
#include "gradwire/codec/feedback/residuals.h"
#include "gradwire/codec/simd/simd.h"
#include "gradwire/serve/wire/message.h"

namespace gradwire::serve {

Outgoing::Outgoing(const Table& table, Gradients gradients, const Codecs& codecs,
                   std::vector<std::uint8_t> choice, std::shared_ptr<codec::ErrorFeedback> feedback)
    : table_(&table),
      gradients_(std::move(gradients)),
      codecs_(codecs),
      choice_(std::move(choice)),
      feedback_(std::move(feedback)) {}

void Outgoing::open() {
  if (!feedback_) return;
  std::vector<codec::KeyedExtent> extents;
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    const std::string& name = table_->parameters[i].name;
    if (!codec::kernels().finite(gradients_[i].data(), gradients_[i].size()))
      throw InvalidArgument("push: the gradient of '" + name +
                            "' holds NaN or Inf; nothing was sent");
    extents.push_back({name, gradients_[i].size()});
  }
  transaction_.open(*feedback_, extents);
  for (std::size_t i = 0; i < gradients_.size(); ++i)
    codec(i).prepare(gradients_[i].data(), gradients_[i].size(), transaction_.context(i));
}

codec::EncodeContext Outgoing::context(const Piece& piece) const {
  if (!transaction_.is_open()) return {};
  return transaction_.context(piece.parameter).from(piece.offset);
}

std::uint16_t Outgoing::codec_of(const Layout& layout, const ShardFrame& frame) const {
  const auto pieces = layout.pieces(frame);
  const std::uint8_t first = choice_[pieces.front().parameter];
  const bool alike = std::ranges::all_of(
      pieces, [&](const Piece& piece) { return choice_[piece.parameter] == first; });
  return alike ? first : kMixedCodecs;
}

std::size_t Outgoing::encode(const Layout& layout, const ShardFrame& frame, Bytes out, Copy copy) {
  std::size_t bytes = 0;
  if (codec_of(layout, frame) == kMixedCodecs)
    for (const Piece& piece : layout.pieces(frame))
      out[bytes++] = static_cast<std::byte>(choice_[piece.parameter]);
  for (const Piece& piece : layout.pieces(frame)) {
    const float* const x = gradients_[piece.parameter].data() + piece.offset * layout.words();
    if (choice_[piece.parameter] == 0 && !transaction_.is_open()) {
      const std::size_t size = piece.count * layout.words() * sizeof(float);
      copy(out.data() + bytes, reinterpret_cast<const std::byte*>(x), size);
      bytes += size;
    } else {
      bytes +=
          codec::encode(codec(piece.parameter), x, piece.count, context(piece), out.subspan(bytes));
    }
  }
  return bytes;
}

void Outgoing::keep(const Layout& layout, const ShardFrame& frame) {
  if (!transaction_.is_open()) return;
  for (const Piece& piece : layout.pieces(frame)) {
    const float* const x = gradients_[piece.parameter].data() + piece.offset;
    std::vector<float> unsent(x, x + piece.count);
    codec::add_residual(context(piece), unsent.data(), piece.count);
    for (float& each : unsent)
      if (!std::isfinite(each)) each = 0;
    codec::keep(context(piece), unsent.data(), piece.count);
  }
}

void Outgoing::close() {
  if (!transaction_.is_open()) return;
  for (std::size_t i = 0; i < gradients_.size(); ++i)
    codec(i).adapt(gradients_[i].size(), *transaction_.context(i).codec_state);
  transaction_.settle(true);
}

void Outgoing::give_back(const Layout& layout, const ShardFrame& frame, ConstBytes payload) {
  std::vector<float> values(frame.count);
  decode_frame(codecs_, codec_of(layout, frame), layout, frame, payload, /*add=*/false,
               values.data());
  returned_.resize(gradients_.size());
  for (const Piece& piece : layout.pieces(frame)) {
    std::vector<float>& whole = returned_[piece.parameter];
    whole.resize(gradients_[piece.parameter].size());
    const auto from = values.begin() + static_cast<std::ptrdiff_t>(piece.first - frame.first);
    std::copy_n(from, piece.count, whole.begin() + static_cast<std::ptrdiff_t>(piece.offset));
  }
}

void Outgoing::finish_giving_back() {
  for (std::size_t i = 0; i < returned_.size(); ++i)
    if (!returned_[i].empty()) feedback_->add(table_->parameters[i].name, returned_[i]);
  returned_.clear();
}

}  // namespace gradwire::serve
