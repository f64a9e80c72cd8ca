// The steps of a CpuDevice that exchange payloads: those of a codec, with a table of their lengths
// in front, which every rank adds up in rank order; and those of codecs written in Python.
#include <algorithm>
#include <cstring>
#include <string>

#include "gradwire/base/error.h"
#include "gradwire/codec/feedback/residuals.h"
#include "gradwire/codec/reduction/fold.h"
#include "gradwire/exec/control/identity.h"
#include "gradwire/exec/program/cpu_device.h"

namespace gradwire::exec {
namespace {

// Returns the size of the table in front of the payloads, which has the length of each array's
// payload.
std::size_t table_bytes(std::size_t arrays) { return arrays * sizeof(std::uint32_t); }

}  // namespace

void CpuDevice::begin_payloads() {
  if (original_.payloads) {
    limit_ = original_.payloads->limit;
  } else {
    limit_ = table_bytes(program_.counts().size());
    for (std::uint64_t count : program_.counts()) limit_ += original_.codec->max_bytes(count);
  }
  Request gather = program_.phase(Collective::kAllGather, DType::kUInt8, ReduceOp::kSum);
  gather.algorithm = program_.decision().algorithm;
  payloads_.start(gather);
}

const Request* CpuDevice::exchange_lengths() {
  const auto& given = original_.payloads;
  if (!given) return &payloads_.lengths(used_);
  payloads_.own() = given->own;
  return &payloads_.lengths(given->own.size(), given->finite);
}

void CpuDevice::return_payloads() {
  ExchangePayloads& payloads = *original_.payloads;
  for (Rank r = 0; r < original_.size; ++r) {
    const ConstBytes payload = payloads_.of(r);
    payloads.all.insert(payloads.all.end(), payload.begin(), payload.end());
    payloads.ends.push_back(payloads.all.size());
  }
  payloads.all_finite = payloads_.all_flagged();
}

void CpuDevice::encode(std::span<const SummedArray> arrays) {
  const Stopwatch stopwatch(spent_.encode);
  const codec::Codec& codec = *original_.codec;
  std::vector<std::byte>& out = payloads_.own();
  if (out.size() < limit_) out.resize(limit_);
  used_ = table_bytes(arrays.size());
  for (const SummedArray& each : arrays) {
    feedback_.prepare(codec, each.index, each.x);
    const codec::EncodeContext context = feedback_.context(each.index, original_.rank, operation_);
    const std::size_t size =
        codec::encode(codec, each.x, each.count, context, Bytes(out).subspan(used_));
    const auto length = static_cast<std::uint32_t>(size);
    std::memcpy(out.data() + table_bytes(each.index), &length, sizeof length);
    used_ += size;
  }
  feedback_.adapt(codec);
}

void CpuDevice::add_up(std::span<const SummedArray> arrays) {
  const Stopwatch stopwatch(spent_.decode);
  starts_.assign(at(original_.size), table_bytes(arrays.size()));
  array_payloads_.resize(starts_.size());
  for (const SummedArray& each : arrays) {
    for (Rank r = 0; r < original_.size; ++r) take_payload(r, each.index);
    if (each.y != nullptr) sum(each);
  }
  check_ends();
}

// Takes a rank's payload of an array. Its length is not trusted: it is checked, and loaded once.
void CpuDevice::take_payload(Rank from, std::size_t array) {
  const auto r = at(from);
  const ConstBytes all = payloads_.of(from);
  std::uint32_t length = 0;
  if (all.size() >= table_bytes(program_.counts().size()))
    std::memcpy(&length, all.data() + table_bytes(array), sizeof length);
  if (starts_[r] > all.size() || length > all.size() - starts_[r])
    refuse(from, "it is shorter than its parts");
  array_payloads_[r] = all.subspan(starts_[r], length);
  starts_[r] += length;
}

void CpuDevice::check_ends() const {
  for (Rank r = 0; r < original_.size; ++r)
    if (starts_[at(r)] != payloads_.of(r).size()) refuse(r, "it is longer than its parts");
}

// Sums an array's payloads.
void CpuDevice::sum(const SummedArray& array) {
  try {
    original_.codec->decode_sum(array_payloads_, array.y, array.count);
  } catch (const InvalidArgument& error) {
    refuse(sender_of_invalid_payload(array.count), error.what());
  }
  mark({&array, 1});
  if (original_.op == ReduceOp::kAvg) average({&array, 1});
}

// Returns the rank whose payload of an array cannot be decoded, if there must be one.
Rank CpuDevice::sender_of_invalid_payload(std::size_t count) const {
  std::vector<float> scratch(count);
  for (Rank r = 0; r < original_.size; ++r) {
    const ConstBytes payload = array_payloads_[at(r)];
    try {
      if (original_.codec->decode(payload, scratch.data(), count).bytes != payload.size()) return r;
    } catch (const InvalidArgument&) {
      return r;
    }
  }
  return original_.rank;
}

void CpuDevice::refuse(Rank from, const std::string& why) const {
  throw TransportError(name_of(original_.rank) + ": rank " + std::to_string(from) +
                           " sent a payload that can't be decoded: " + why,
                       from);
}

}  // namespace gradwire::exec
