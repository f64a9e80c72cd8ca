// The parts of gpu_kernels.cc.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "gpu_device.h"

namespace gradwire::cuda {

// A row, whose body may throw.
using Guarded = std::function<void(const std::string& group, const std::string& which,
                                   const std::function<void(Row&)>& body)>;

std::vector<std::string_view> codec_specs(bool small);
std::vector<std::size_t> codec_lengths(std::string_view spec, bool small);
// Encoding, decoding and summing n elements of every kind.
void check_codec(const Device& on, std::string_view spec, std::size_t n, bool small, Row& row);
// Folds, every dtype and op.
void check_elements(const Device& on, bool small, const Guarded& guarded);
// lowrank's passes over a matrix.
void check_matrices(const Device& on, bool small, const Guarded& guarded);
// Payloads that a codec refuses.
void check_payloads(const Device& on, bool small, const Guarded& guarded);
// What needs 64-bit sizes, as far as the device has memory.
void check_long(const Device& on, const Guarded& guarded);

}  // namespace gradwire::cuda
