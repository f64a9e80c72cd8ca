#include "gradwire/codec/payload.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/codec/feedback/residuals.h"
#include "gradwire/codec/lowrank.h"
#include "gradwire/codec/simd/simd.h"
#include "gradwire/codec/spec.h"

namespace gradwire::codec {
namespace {

using Transaction = ErrorFeedback::Transaction;

Factors factors_of(const LowRank& codec, MatrixShape shape) {
  return {shape.rows, shape.columns, codec.rank()};
}

std::size_t factor_elements(const Factors& of) { return (of.rows + of.columns) * of.rank; }

// Returns the codec if it is lowrank and the matrix is to be factored, else null.
const LowRank* factoring(const Codec& codec, MatrixShape shape) {
  if (codec.definition().kind != Definition::Kind::kLowRank) return nullptr;
  const auto& lowrank = static_cast<const LowRank&>(codec);
  return worth_factoring(factors_of(lowrank, shape)) ? &lowrank : nullptr;
}

// Returns whether x plus the residual is finite.
bool finite_sum(const float* x, std::size_t n, const EncodeContext& context) {
  constexpr std::size_t kAtOnce = 4096;
  if (!context.has_residual()) return kernels().finite(x, n);
  std::vector<float> sum(std::min(n, kAtOnce));
  for (std::size_t i = 0; i < n; i += kAtOnce) {
    const std::size_t count = std::min(kAtOnce, n - i);
    std::copy_n(x + i, count, sum.begin());
    add_residual(context.from(i), sum.data(), count);
    if (!kernels().finite(sum.data(), count)) return false;
  }
  return true;
}

// A matrix's factors, p and then q with headroom (codec/factors.h), while they are made.
class MatrixFactors {
 public:
  MatrixFactors(const Factors& of, const float* x, const EncodeContext& context)
      : of_(of), context_(context), x_(x), factors_(factor_elements(of)) {
    if (context.has_residual()) {
      sum_.assign(x, x + elements());
      add_residual(context, sum_.data(), elements());
      x_ = sum_.data();
    }
  }

  // `last`: q of the key's last call.
  void factor(std::span<const float> last) {
    std::vector<double> room;
    start_factor(last, of_, q());
    kernels().lowrank.left(x_, nullptr, nullptr, q().data(), p().data(), of_);
    orthonormalise(of_, p(), room);
    kernels().lowrank.right(x_, p().data(), q().data(), of_);
  }
  void fill(float value) { std::ranges::fill(factors_, value); }
  std::span<const float> factors() const { return factors_; }

  // Writes what the factors do not hold, and q for the next call.
  void keep_error(std::vector<float>& memory) {
    memory.assign(q().begin(), q().end());
    std::vector<float> product(elements()), error(elements());
    LowRankResult result{};
    result.p = p().data();
    result.q = result.own_q = memory.data();
    result.scale = result.own_scale = take_headroom(memory);
    result.y = product.data();
    result.v = x_;
    result.error = error.data();
    kernels().lowrank.product(result, of_);
    keep(context_, error.data(), error.size());
  }

 private:
  std::size_t elements() const { return of_.rows * of_.columns; }
  std::span<float> p() { return std::span(factors_).first(of_.rows * of_.rank); }
  std::span<float> q() { return std::span(factors_).subspan(of_.rows * of_.rank); }

  const Factors of_;
  const EncodeContext context_;
  const float* x_;
  std::vector<float> sum_, factors_;
};

std::size_t encode_factors(const LowRank& codec, const float* x, MatrixShape shape, Bytes out,
                           const EncodeContext& context, bool finite, Transaction& transaction) {
  MatrixFactors matrix(factors_of(codec, shape), x, context);
  if (finite)
    matrix.factor(transaction.is_open() ? transaction.memory(0) : std::span<const float>());
  else
    matrix.fill(std::numeric_limits<float>::quiet_NaN());
  const auto bytes = std::as_bytes(matrix.factors());
  check_room(codec, out.size(), bytes.size(), shape.elements());
  std::ranges::copy(bytes, out.begin());
  if (finite && transaction.is_open()) matrix.keep_error(transaction.next_memory(0));
  return bytes.size();
}

void decode_factors(const LowRank& codec, ConstBytes in, MatrixShape shape, float* y) {
  const Factors of = factors_of(codec, shape);
  std::vector<float> factors(factor_elements(of));
  std::memcpy(factors.data(), in.data(), in.size());
  if (!kernels().finite(factors.data(), factors.size())) {
    std::fill_n(y, shape.elements(), std::numeric_limits<float>::quiet_NaN());
    return;
  }
  const auto q = std::span(factors).subspan(of.rows * of.rank);
  LowRankResult result{};
  result.p = factors.data();
  result.q = q.data();
  result.scale = take_headroom(q);
  result.y = y;
  kernels().lowrank.product(result, of);
}

// What lowrank does not factor travels as it is.
const Codec& elementwise(const Codec& codec) {
  static const std::shared_ptr<const Codec> plain = make_codec("none");
  return codec.combine() == Combine::kCompound ? *plain : codec;
}

std::size_t encode_elements(const Codec& codec, const float* x, std::size_t n, Bytes out,
                            const EncodeContext& context) {
  codec.prepare(x, n, context);
  const std::size_t bytes = encode(codec, x, n, context, out);
  codec.adapt(n, *context.codec_state);
  return bytes;
}

}  // namespace

std::size_t most_payload(const Codec& codec, MatrixShape shape) noexcept {
  if (const LowRank* lowrank = factoring(codec, shape))
    return factor_elements(factors_of(*lowrank, shape)) * sizeof(float);
  return codec.max_bytes(shape.elements());
}

std::size_t encode_array(const Codec& codec, const float* x, MatrixShape shape, Bytes out,
                         ErrorFeedback* feedback, const std::string& key, std::uint64_t call) {
  const FloatEnvironment environment;
  const std::size_t n = shape.elements();
  CodecState codec_state;
  EncodeContext context;
  context.call = call;
  context.codec_state = &codec_state;
  Transaction transaction;
  if (feedback != nullptr) {
    const KeyedArray array{key, n};
    transaction.open(*feedback, {&array, 1});
    context = transaction.context(0);
  }
  const bool finite = finite_sum(x, n, context);
  const LowRank* lowrank = factoring(codec, shape);
  const std::size_t bytes =
      lowrank != nullptr ? encode_factors(*lowrank, x, shape, out, context, finite, transaction)
                         : encode_elements(elementwise(codec), x, n, out, context);
  transaction.settle(finite);
  return bytes;
}

void decode_array(const Codec& codec, ConstBytes in, MatrixShape shape, float* y) {
  const FloatEnvironment environment;
  const std::size_t n = shape.elements();
  std::size_t used = 0;
  if (const LowRank* lowrank = factoring(codec, shape)) {
    used = most_payload(codec, shape);
    check_room(codec, in.size(), used, n);
    decode_factors(*lowrank, in.first(used), shape, y);
  } else {
    used = elementwise(codec).decode(in, y, n).bytes;
  }
  if (used != in.size())
    throw InvalidArgument("codec '" + codec.name() + "': the payload has " +
                          std::to_string(in.size()) + " bytes, and " + std::to_string(n) +
                          " elements take " + std::to_string(used));
}

}  // namespace gradwire::codec
