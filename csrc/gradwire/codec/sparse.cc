#include "gradwire/codec/sparse.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "gradwire/base/error.h"
#include "gradwire/codec/bits.h"
#include "gradwire/codec/simd/simd.h"

namespace gradwire::codec {
namespace {

constexpr unsigned kFormatBits = 3, kMostLowBits = 15;
constexpr std::size_t kShortCount = 128;
constexpr std::size_t kSamples = 1024;

[[noreturn]] void refuse(const char* why) {
  throw InvalidArgument(std::string("sparse payload: ") + why);
}

std::size_t bytes_of_count(std::size_t count) { return count < kShortCount ? 1 : 2; }

// Returns the gap before an index, less 1.
std::uint32_t gap_before(std::span<const std::uint16_t> index, std::size_t k) {
  return k == 0 ? index[0] : std::uint32_t{index[k]} - index[k - 1] - 1U;
}

std::size_t gap_bits(std::span<const std::uint16_t> index, unsigned low) {
  std::uint32_t zeros = gap_before(index, 0) >> low;
  for (std::size_t k = 1; k < index.size(); ++k) zeros += gap_before(index, k) >> low;
  return zeros + index.size() * (1 + low);
}

struct GapCode {
  unsigned low;
  std::size_t bits;
};

// Returns the shortest code. The size is convex in `low`, so it is enough to walk downhill.
GapCode best_gap_code(std::span<const std::uint16_t> index, std::size_t n) {
  const auto start = static_cast<unsigned>(std::bit_width(n / index.size()) - 1);
  GapCode best{start, gap_bits(index, start)};
  const auto walk = [&](unsigned step, unsigned end, bool on_ties) {
    while (best.low != end) {
      const GapCode next{best.low + step, gap_bits(index, best.low + step)};
      if (next.bits > best.bits || (next.bits == best.bits && !on_ties)) return;
      best = next;
    }
  };
  walk(1, kMostLowBits, /*on_ties=*/false);
  walk(~0U, 0, /*on_ties=*/true);
  return best;
}

void write_gap(BitWriter& bits, std::uint32_t gap, unsigned low) {
  std::uint32_t zeros = gap >> low;
  for (; zeros + 1 + low > 32; zeros -= std::min(zeros, 16U)) bits.write(0, std::min(zeros, 16U));
  bits.write(((gap & ((1U << low) - 1)) << 1 | 1) << zeros, zeros + 1 + low);
}

std::uint32_t read_gap(BitReader& bits, unsigned low) {
  std::uint32_t zeros = 0;
  for (; bits.peek() == 0; zeros += 32)
    if (zeros > kSparseBlock || !bits.skip(32)) refuse("a gap does not end");
  const auto last = static_cast<unsigned>(std::countr_zero(bits.peek()));
  bits.skip(last + 1);
  const auto rest = static_cast<std::uint32_t>(bits.peek() & ((1U << low) - 1));
  if (!bits.skip(low)) refuse("it is cut short in its gaps");
  return ((zeros + last) << low) | rest;
}

std::byte* write_head(PositionFormat format, unsigned low, std::byte* out) {
  *out = static_cast<std::byte>(static_cast<unsigned>(format) | low << kFormatBits);
  return out + 1;
}

std::byte* write_count(std::size_t count, std::byte* out) {
  const std::size_t more = count < kShortCount ? 0 : kShortCount;
  *out++ = static_cast<std::byte>((count & (kShortCount - 1)) | more);
  if (more > 0) *out++ = static_cast<std::byte>(count / kShortCount);
  return out;
}

std::byte* write_list(std::span<const std::uint16_t> index, std::byte* out) {
  out = write_count(index.size(), write_head(PositionFormat::kList, 0, out));
  std::memcpy(out, index.data(), index.size_bytes());
  return out + index.size_bytes();
}

std::byte* write_gaps(std::span<const std::uint16_t> index, const GapCode& code, std::byte* out) {
  out = write_count(index.size(), write_head(PositionFormat::kGaps, code.low, out));
  BitWriter bits(out);
  for (std::size_t k = 0; k < index.size(); ++k) write_gap(bits, gap_before(index, k), code.low);
  bits.finish();
  return out + (code.bits + 7) / 8;
}

std::byte* write_bitmap(std::span<const std::uint16_t> index, std::size_t n, std::byte* out) {
  out = write_head(PositionFormat::kBitmap, 0, out);
  const std::size_t bytes = (n + 7) / 8;
  std::memset(out, 0, bytes);
  for (const std::size_t i : index) out[i / 8] |= std::byte{1} << (i % 8);
  return out + bytes;
}

std::byte* write_best(std::span<const std::uint16_t> index, std::size_t n, std::byte* out) {
  if (index.empty()) return write_head(PositionFormat::kNone, 0, out);
  if (index.size() == n) return write_head(PositionFormat::kAll, 0, out);
  const GapCode code = best_gap_code(index, n);
  const std::size_t count = bytes_of_count(index.size()), list = count + index.size_bytes(),
                    gaps = count + (code.bits + 7) / 8, bitmap = (n + 7) / 8;
  if (list <= gaps && list <= bitmap) return write_list(index, out);
  if (gaps <= bitmap) return write_gaps(index, code, out);
  return write_bitmap(index, n, out);
}

}  // namespace

void Positions::take(const HitMask& hits, std::size_t n) {
  count = 0;
  for (std::size_t word = 0; word < (n + 63) / 64; ++word)
    for (std::uint64_t left = hits[word]; left != 0; left &= left - 1)
      index[count++] =
          static_cast<std::uint16_t>(64 * word + static_cast<unsigned>(std::countr_zero(left)));
}

std::size_t write_positions(std::span<const std::uint16_t> index, std::size_t n, std::byte* out) {
  return static_cast<std::size_t>(write_best(index, n, out) - out);
}

std::size_t write_not_finite(std::byte* out) {
  write_head(PositionFormat::kNotFinite, 0, out);
  return 1;
}

ConstBytes PayloadReader::take(std::size_t bytes) {
  if (left_.size() < bytes) refuse("it is cut short");
  const ConstBytes taken = left_.first(bytes);
  left_ = left_.subspan(bytes);
  return taken;
}

std::size_t PayloadReader::count() {
  const std::size_t low = byte();
  return low < kShortCount ? low : (low & (kShortCount - 1)) + kShortCount * byte();
}

PositionFormat PayloadReader::positions(std::size_t n, Positions& out) {
  const unsigned head = byte(), low = head >> kFormatBits;
  const auto format = static_cast<PositionFormat>(head & ((1U << kFormatBits) - 1));
  if (format > PositionFormat::kNotFinite ||
      low > (format == PositionFormat::kGaps ? kMostLowBits : 0))
    refuse("its first byte means nothing");
  out.count = 0;
  if (format == PositionFormat::kList) list(n, out);
  if (format == PositionFormat::kGaps) gaps(low, n, out);
  if (format == PositionFormat::kBitmap) bitmap(n, out);
  if (format == PositionFormat::kAll)
    for (; out.count < n; ++out.count) out.index[out.count] = static_cast<std::uint16_t>(out.count);
  return format;
}

void PayloadReader::list(std::size_t n, Positions& out) {
  const std::size_t count = this->count();
  if (count > n) refuse("it has more indices than elements");
  std::memcpy(out.index.data(), take(2 * count).data(), 2 * count);
  out.count = count;
  for (std::size_t k = 0; k < count; ++k)
    if (out.index[k] >= n || (k > 0 && out.index[k] <= out.index[k - 1]))
      refuse("its indices do not ascend, or leave the block");
}

void PayloadReader::gaps(unsigned low, std::size_t n, Positions& out) {
  const std::size_t count = this->count();
  if (count > n) refuse("it has more indices than elements");
  BitReader bits(left_.data(), left_.size());
  std::size_t next = 0;
  for (std::size_t k = 0; k < count; ++k) {
    const std::size_t i = next + read_gap(bits, low);
    if (i >= n) refuse("its gaps leave the block");
    out.index[k] = static_cast<std::uint16_t>(i);
    next = i + 1;
  }
  out.count = count;
  take(bits.bytes_read());
}

void PayloadReader::bitmap(std::size_t n, Positions& out) {
  HitMask hits;
  hits[(n + 63) / 64 - 1] = 0;
  const ConstBytes bytes = take((n + 7) / 8);
  std::memcpy(hits.data(), bytes.data(), bytes.size());
  if (n % 64 != 0 && hits[n / 64] >> (n % 64) != 0) refuse("its bitmap leaves the block");
  out.take(hits, n);
}

std::size_t share_of(double density, std::size_t n) noexcept {
  const auto share = static_cast<std::size_t>(density * static_cast<double>(n) + 0.5);
  return std::clamp<std::size_t>(share, 1, n);
}

std::uint32_t magnitude_bits(float x) noexcept {
  return std::bit_cast<std::uint32_t>(x) & 0x7FFFFFFFU;
}

SparseScratch& SparseScratch::mine() {
  thread_local const auto scratch = std::make_unique<SparseScratch>();
  return *scratch;
}

namespace {

// Returns a magnitude that some 1.5 k elements exceed, as estimated from a sample; 0 for none.
float sampled_filter(SparseSource block, std::size_t k, SparseScratch& scratch) {
  const std::size_t stride = std::max<std::size_t>(1, block.n / kSamples);
  std::size_t count = 0;
  for (std::size_t i = 0; i < block.n; i += stride)
    scratch.order[count++] = magnitude_bits(block[i]);
  const std::size_t rank = (3 * k * count) / (2 * block.n) + 4;
  if (rank >= count) return 0;
  const auto nth = scratch.order.begin() + static_cast<std::ptrdiff_t>(rank);
  std::nth_element(scratch.order.begin(), nth,
                   scratch.order.begin() + static_cast<std::ptrdiff_t>(count), std::greater<>());
  return *nth < kInfinityBits ? std::bit_cast<float>(static_cast<std::uint32_t>(*nth)) : 0;
}

// Returns a key that is greater for larger magnitudes and, of equal ones, for lower indices.
std::uint64_t rank_of(float v, std::uint16_t index) {
  return std::uint64_t{magnitude_bits(v)} << 16 | (0xFFFFU - index);
}

// Drops all but the k largest of the positions; returns the smallest magnitude of those.
std::uint32_t keep_largest(SparseSource block, std::size_t k, SparseScratch& scratch) {
  Positions& positions = scratch.positions;
  const auto end = static_cast<std::ptrdiff_t>(positions.count);
  for (std::size_t c = 0; c < positions.count; ++c)
    scratch.ranks[c] = rank_of(block[positions.index[c]], positions.index[c]);
  std::copy_n(scratch.ranks.begin(), end, scratch.order.begin());
  const auto last = scratch.order.begin() + static_cast<std::ptrdiff_t>(k - 1);
  std::nth_element(scratch.order.begin(), last, scratch.order.begin() + end, std::greater<>());
  std::size_t kept = 0;
  for (std::size_t c = 0; c < positions.count; ++c) {
    positions.index[kept] = positions.index[c];
    kept += scratch.ranks[c] >= *last ? 1 : 0;
  }
  positions.count = kept;
  return static_cast<std::uint32_t>(*last >> 16);
}

}  // namespace

std::uint32_t select_largest(SparseSource block, std::size_t k, float* keep, float& filter,
                             SparseScratch& scratch) {
  const auto pass = [&] {
    scratch.hits[(block.n - 1) / 64] = 0;
    const std::uint32_t largest = kernels().sparse.filter(block.x, block.residual, filter, block.n,
                                                          scratch.hits.data(), keep);
    if (keep != nullptr) block = {keep, nullptr, block.n};
    keep = nullptr;
    scratch.positions.take(scratch.hits, block.n);
    return largest;
  };
  const bool guessed = filter > 0;
  if (!guessed) filter = sampled_filter(block, k, scratch);
  const std::uint32_t largest = pass();
  if (largest >= kInfinityBits) return largest;
  if (scratch.positions.count < k && guessed) {
    filter = sampled_filter(block, k, scratch);
    pass();
  }
  if (scratch.positions.count < k) {
    filter = 0;
    pass();
  }
  const std::uint32_t smallest = keep_largest(block, k, scratch);
  filter = std::bit_cast<float>(smallest) * 0.9375F;
  return smallest;
}

SparseCodec::SparseCodec(const std::string& name, const Definition& definition,
                         SecondsPerByte seconds)
    : Codec({.name = name,
             .definition = definition,
             .biased = true,
             .block = kSparseBlock,
             .fixed_size = false,
             .seconds_per_byte = seconds}) {}

std::size_t SparseCodec::max_bytes(std::size_t n) const noexcept {
  const std::size_t rest = n % kSparseBlock;
  return n / kSparseBlock * most_bytes(kSparseBlock) + (rest > 0 ? most_bytes(rest) : 0);
}

std::size_t SparseCodec::write(const float* x, std::size_t n, const EncodeContext& context,
                               std::byte* out) const {
  std::size_t size = 0;
  for (std::size_t i = 0; i < n; i += kSparseBlock) {
    const EncodeContext here = context.from(i);
    size += encode_block({x + i, here.residual, std::min(kSparseBlock, n - i)}, here.error,
                         here.codec_state, out + size);
  }
  return size;
}

Decoded SparseCodec::read(ConstBytes in, bool add, float* y, std::size_t n) const {
  if (!add && n > 0) std::memset(y, 0, n * sizeof(float));
  PayloadReader reader(in);
  Positions& positions = SparseScratch::mine().positions;
  bool finite = true;
  for (std::size_t i = 0; i < n; i += kSparseBlock) {
    const std::size_t length = std::min(kSparseBlock, n - i);
    if (reader.positions(length, positions) == PositionFormat::kNotFinite) {
      std::fill_n(y + i, length, std::numeric_limits<float>::quiet_NaN());
      finite = false;
    }
    if (positions.count > 0) finite = read_values(reader, positions, add, y + i) && finite;
  }
  return {in.size() - reader.left(), finite};
}

void clear_not_finite(float* error, std::size_t n) {
  for (std::size_t i = 0; error != nullptr && i < n; ++i)
    if (!std::isfinite(error[i])) error[i] = 0;
}

}  // namespace gradwire::codec
