#include "gradwire/serve/client/outgoing.h"

#include <algorithm>
#include <cmath>

#include "gradwire/base/error.h"
#include "gradwire/codec/feedback/residuals.h"
#include "gradwire/codec/simd/simd.h"
#include "gradwire/serve/wire/message.h"

namespace gradwire::serve {

Outgoing::Outgoing(const ParameterTable& table, Gradients gradients, const Codecs& codecs,
                   std::vector<std::uint8_t> choice, std::shared_ptr<codec::ErrorFeedback> feedback)
    : table_(&table),
      gradients_(std::move(gradients)),
      codecs_(codecs),
      choice_(std::move(choice)),
      feedback_(std::move(feedback)) {}

void Outgoing::open() {
  if (!feedback_) return;
  std::vector<codec::KeyedArray> arrays;
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    const std::string& name = table_->parameters[i].name;
    if (!codec::kernels().finite(gradients_[i].data(), gradients_[i].size()))
      throw InvalidArgument("push: the gradient of '" + name +
                            "' holds NaN or Inf; nothing was sent");
    arrays.push_back({name, gradients_[i].size()});
  }
  transaction_.open(*feedback_, arrays);
  for (std::size_t i = 0; i < gradients_.size(); ++i)
    codec(i).prepare(gradients_[i].data(), gradients_[i].size(), transaction_.context(i));
}

codec::EncodeContext Outgoing::context(const ParameterSpan& span) const {
  if (!transaction_.is_open()) return {};
  return transaction_.context(span.parameter).from(span.offset);
}

std::uint16_t Outgoing::codec_of(const ShardLayout& layout, const ShardFrame& frame) const {
  const auto spans = layout.spans(frame);
  const std::uint8_t first = choice_[spans.front().parameter];
  const bool alike = std::ranges::all_of(
      spans, [&](const ParameterSpan& span) { return choice_[span.parameter] == first; });
  return alike ? first : kMixedCodecs;
}

std::size_t Outgoing::encode(const ShardLayout& layout, const ShardFrame& frame, Bytes out,
                             Copy copy) {
  std::size_t bytes = 0;
  if (codec_of(layout, frame) == kMixedCodecs)
    for (const ParameterSpan& span : layout.spans(frame))
      out[bytes++] = static_cast<std::byte>(choice_[span.parameter]);
  for (const ParameterSpan& span : layout.spans(frame)) {
    const float* const x = gradients_[span.parameter].data() + span.offset * layout.words();
    if (choice_[span.parameter] == 0 && !transaction_.is_open()) {
      const std::size_t size = span.count * layout.words() * sizeof(float);
      copy(out.data() + bytes, reinterpret_cast<const std::byte*>(x), size);
      bytes += size;
    } else {
      bytes +=
          codec::encode(codec(span.parameter), x, span.count, context(span), out.subspan(bytes));
    }
  }
  return bytes;
}

void Outgoing::keep(const ShardLayout& layout, const ShardFrame& frame) {
  if (!transaction_.is_open()) return;
  for (const ParameterSpan& span : layout.spans(frame)) {
    const float* const x = gradients_[span.parameter].data() + span.offset;
    std::vector<float> unsent(x, x + span.count);
    codec::add_residual(context(span), unsent.data(), span.count);
    for (float& each : unsent)
      if (!std::isfinite(each)) each = 0;
    codec::keep(context(span), unsent.data(), span.count);
  }
}

void Outgoing::close() {
  if (!transaction_.is_open()) return;
  for (std::size_t i = 0; i < gradients_.size(); ++i)
    codec(i).adapt(gradients_[i].size(), *transaction_.context(i).codec_state);
  transaction_.settle(true);
}

void Outgoing::give_back(const ShardLayout& layout, const ShardFrame& frame, ConstBytes payload) {
  std::vector<float> values(frame.count);
  decode_frame(codecs_, codec_of(layout, frame), layout, frame, payload, /*add=*/false,
               values.data());
  returned_.resize(gradients_.size());
  for (const ParameterSpan& span : layout.spans(frame)) {
    std::vector<float>& whole = returned_[span.parameter];
    whole.resize(gradients_[span.parameter].size());
    const auto from = values.begin() + static_cast<std::ptrdiff_t>(span.first - frame.first);
    std::copy_n(from, span.count, whole.begin() + static_cast<std::ptrdiff_t>(span.offset));
  }
}

void Outgoing::finish_giving_back() {
  for (std::size_t i = 0; i < returned_.size(); ++i)
    if (!returned_[i].empty()) feedback_->add(table_->parameters[i].name, returned_[i]);
  returned_.clear();
}

}  // namespace gradwire::serve
