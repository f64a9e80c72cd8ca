// Update rules of a parameter server (serve/shard/update_rule.cc defines what they compute). Here
// multiply-adds are fused: a·b + c is rounded once, as torch's optimizers round it.
#pragma once

#include "gradwire/codec/simd/simd.h"
#include "gradwire/codec/simd/simd_sweep.h"

namespace gradwire::codec {
namespace {

// Each simd_<isa>.cc defines these two: a·b + c, and the square root, each rounded once.
F32 fused(F32 a, F32 b, F32 c);
F32 root(F32 x);

void update_sgd(float* w, const float* g, float rate, std::size_t n) noexcept {
  const F32 step = F32{} - rate;
  sweep<kLanes>(n, [=](std::size_t i, auto part) {
    store<Floats>(w, i, part, fused(step, load<Floats>(g, i, part), load<Floats>(w, i, part)));
  });
}

template <bool kNesterov>
void update_momentum(float* w, float* velocity, const float* g, float rate, float momentum,
                     std::size_t n) noexcept {
  const F32 step = F32{} - rate, kept = F32{} + momentum;
  sweep<kLanes>(n, [=](std::size_t i, auto part) {
    const F32 gradient = load<Floats>(g, i, part);
    const F32 v = kept * load<Floats>(velocity, i, part) + gradient;
    store<Floats>(velocity, i, part, v);
    const F32 direction = kNesterov ? fused(kept, v, gradient) : v;
    store<Floats>(w, i, part, fused(step, direction, load<Floats>(w, i, part)));
  });
}

void update_adagrad(float* w, float* squares, const float* g, float rate, std::size_t n) noexcept {
  const F32 step = F32{} - rate;
  sweep<kLanes>(n, [=](std::size_t i, auto part) {
    const F32 gradient = load<Floats>(g, i, part);
    const F32 sum = fused(gradient, gradient, load<Floats>(squares, i, part));
    store<Floats>(squares, i, part, sum);
    store<Floats>(w, i, part, load<Floats>(w, i, part) + step * gradient / root(sum));
  });
}

void update_adam(float* w, float* mean, float* squares, const float* g, const AdamStep& adam,
                 std::size_t n) noexcept {
  sweep<kLanes>(n, [=](std::size_t i, auto part) {
    const F32 gradient = load<Floats>(g, i, part), before = load<Floats>(mean, i, part);
    const F32 m = fused(F32{} + adam.of_mean, gradient - before, before);
    const F32 v = fused(gradient * adam.of_square, gradient,
                        load<Floats>(squares, i, part) * adam.kept_square);
    store<Floats>(mean, i, part, m);
    store<Floats>(squares, i, part, v);
    const F32 scale = root(v) / adam.root_of_correction + adam.epsilon;
    store<Floats>(w, i, part, load<Floats>(w, i, part) - m * adam.step / scale);
  });
}

constexpr RuleKernels kRules = {update_sgd, update_momentum<false>, update_momentum<true>,
                                update_adagrad, update_adam};

}  // namespace
}  // namespace gradwire::codec
