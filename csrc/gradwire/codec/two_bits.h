// Values in two bits: a sign, and one of two magnitudes of their group (topk's values=2bit).
//
// Values in their order form groups of 512; the last one may be smaller. Of a group, let m
// be |v| in units of 2^(e - 21), rounded down, where 2^e <= the largest |v| < 2^(e + 1). Values
// whose m is beyond the mean of all m are high, the others low. A level is the mean m of the low or
// of the high values, as a float32, in bf16 to nearest even, limited to its largest; 0 where there
// are none, and in a group whose largest |v| is below 2^-100. y := the level with the sign of v.
// Means are sums divided by counts and rounded down: integers, so no order of adding matters.
//
// Bytes: for each group the low and the high level, 2 each; then 2 bits a value, first value
// lowest: the sign, and whether it is high; padded to whole bytes. Numbers are little-endian.
#pragma once

#include <cstddef>
#include <span>

#include "gradwire/codec/blocks.h"

namespace gradwire::codec {

// Writes TwoBits::bytes() for finite values, and to `error` what each of them loses: v - y.
void write_two_bits(std::span<const float> v, std::byte* out, float* error);

// Reads untrusted bytes, TwoBits::bytes() of y.size(). Returns whether all of y is finite.
bool read_two_bits(const std::byte* in, std::span<float> y);

}  // namespace gradwire::codec
