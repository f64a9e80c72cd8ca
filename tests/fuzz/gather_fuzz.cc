// What a rank is sent where payloads are gathered: the length that its peer announces, and the
// block that follows, which begins with the lengths of its parts.
//   input: 1 byte, which codec; 8 bytes length, 1 byte flag; the block
#include <array>
#include <numeric>

#include "fuzz.h"
#include "gradwire/codec/simd/simd.h"
#include "gradwire/exec/program/cpu_device.h"

namespace gradwire::fuzz {
namespace {

constexpr std::array kCodecs = {"fp16",
                                "bf16",
                                "int8:block=32",
                                "onebit:block=32",
                                "threshold",
                                "topk",
                                "topk:density=0.5,values=fp16",
                                "topk:density=0.5,values=2bit"};

void overwrite(const exec::Array& array, ConstBytes bytes) {
  const std::size_t size = std::min<std::size_t>(array.count, bytes.size());
  if (size > 0) std::memcpy(array.data, bytes.data(), size);
}

// The calls of rank 0, to whom the input is what rank 1 sends. Where it was as it should be, all
// ranks have a result, which may be anything.
void gather(Input& input) {
  std::vector<float> x(100), y(37);
  std::iota(x.begin(), x.end(), -50.0F);
  std::iota(y.begin(), y.end(), 1.0F);
  const std::array arrays = {
      exec::Array{reinterpret_cast<std::byte*>(x.data()), x.size()},
      exec::Array{reinterpret_cast<std::byte*>(y.data()), y.size()},
  };
  exec::Request call;
  call.codec = codec::make_codec(kCodecs[input.number<std::uint8_t>() % kCodecs.size()]);
  call.algorithm = "gather";
  call.inputs = call.outputs = arrays;
  call.size = 2;
  exec::CpuDevice gather;
  gather.bind(call, exec::decide(call, /*feeds_back=*/false));

  const exec::Request* lengths = gather.next({});
  std::array<std::uint64_t, 2> header{};  // length, flag
  header[0] = input.number<std::uint64_t>();
  header[1] = input.number<std::uint8_t>();
  overwrite(lengths->outputs[1], std::as_bytes(std::span(header)));

  const exec::Request* bytes = gather.next({});
  overwrite(bytes->outputs[1], input.rest());
  require(gather.next({}) == nullptr);
}

}  // namespace
}  // namespace gradwire::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace gradwire::fuzz;
  const gradwire::codec::FloatEnvironment environment;
  Input input(data, size);
  expect_typed([&] { gather(input); });
  return 0;
}
