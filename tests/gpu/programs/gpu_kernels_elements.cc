// Folding, scaling and lowrank's passes on the device beside those of the CPU.
#include <bit>
#include <limits>
#include <random>

#include "codec_reference.h"
#include "gpu_kernels.h"
#include "gradwire/base/types.h"
#include "gradwire/codec/lowrank.h"
#include "gradwire/codec/reduction/fold.h"
#include "gradwire/codec/simd/simd.h"

namespace gradwire::cuda {
namespace {

using codec::Data;
using codec::draw_elements;
using codec::Factors;
using codec::kHeadroom;

void fold_on_cpu(int dtype, int op, Payload& acc, const std::byte* x, std::size_t n) {
  codec::kernels().reduce[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)](acc.data(),
                                                                                         x, n);
}

struct Elements {
  DType dtype;
  int op;
  std::size_t n;
  Payload a, b;
};

void check_fold(const Device& on, const Elements& of, std::size_t shift, Row& row) {
  const int dtype = static_cast<int>(of.dtype);
  Payload expected = of.a;
  fold_on_cpu(dtype, of.op, expected, of.b.data(), of.n);
  const DeviceArray<std::byte> acc(on, of.a), x(on, of.b, shift * size_of(of.dtype));
  const FoldSpan run{acc.data(), acc.data(), of.n, 0};
  on.run(on.api.fold_spans(dtype, of.op, &run, 1, {x.data(), 0, 1}, 1, on.stream), "fold");
  bool intact = true;
  row.expect_same(acc.values(intact), expected, "fold of " + std::to_string(of.n));
  row.expect_same(x.values(intact), of.b, "what was folded");
  row.expect(intact, "written beyond an array");
}

// Both arrays and the first again, and their average where it is asked for.
void check_fold_of_three(const Device& on, const Elements& of, Row& row) {
  const int dtype = static_cast<int>(of.dtype);
  const int divisor = of.op == static_cast<int>(ReduceOp::kAvg) ? 3 : 1;
  Payload all = of.a, expected = of.a;
  all.insert(all.end(), of.b.begin(), of.b.end());
  all.insert(all.end(), of.a.begin(), of.a.end());
  Payload kept = all;
  std::byte* const parts[] = {kept.data(), kept.data() + of.a.size(),
                              kept.data() + 2 * of.a.size()};
  codec::fold_all(of.dtype, static_cast<ReduceOp>(of.op), parts, 0, expected.data(), divisor, of.n);
  const DeviceArray<std::byte> x(on, all), y(on, Payload(of.a.size(), std::byte{0xEE}));
  const FoldSpan run{x.data(), y.data(), of.n, 0};
  const auto stride = static_cast<std::int64_t>(of.a.size());
  on.run(
      on.api.fold_spans(dtype, of.op, &run, 1, {x.data() + stride, stride, 2}, divisor, on.stream),
      "fold of three");
  bool intact = true;
  row.expect_same(y.values(intact), expected, "fold of three, " + std::to_string(of.n));
  row.expect(intact, "written beyond an array");
}

// ---- lowrank -----------------------------------------------------------------------------------

Floats draw_floats(std::size_t n, Data data, std::mt19937_64& random) {
  Floats values(n);
  for (float& each : values) each = codec::draw_float(data, random);
  return values;
}

Floats tiny(Floats values) {
  for (float& each : values) each *= kHeadroom;
  return values;
}

class MatrixCheck {
 public:
  MatrixCheck(const Device& on, const Factors& of, Data data, Row& row)
      : on_(on), of_(of), row_(row), matrix_{of.rows, of.columns, of.rank}, random_(of.rows) {
    x_ = draw_floats(of.rows * of.columns, data, random_);
    residual_ = draw_floats(x_.size(), Data::kNormal, random_);
    q_ = tiny(draw_floats(of.rank * of.columns, Data::kNormal, random_));
    p_ = draw_floats(of.rank * of.rows, Data::kNormal, random_);
  }

  void left() {
    Floats v(x_.size()), expected(p_.size());
    codec::kernels().lowrank.left(x_.data(), residual_.data(), v.data(), q_.data(), expected.data(),
                                  of_);
    const DeviceArray<float> x(on_, x_, 1), e(on_, residual_), q(on_, q_), p(on_, p_), sum(on_, x_);
    const DeviceArray<GpuKeyState> key_state(on_, {GpuKeyState{}});
    const SpanFeedback span_feedback{{e.data(), sum.data()}, key_state.data()};
    const GpuMatrix matrix{.of = matrix_,
                           .x = x.data(),
                           .y = sum.data(),
                           .span_feedback = span_feedback,
                           .p = p.data(),
                           .q = q.data()};
    on_.run(on_.api.left_factor(&matrix, 1, on_.stream), "left_factor");
    expect(p, expected, "left factor");
    expect(sum, v, "input plus residual");
  }
  void right() {
    Floats expected(q_.size());
    codec::kernels().lowrank.right(x_.data(), p_.data(), expected.data(), of_);
    const DeviceArray<float> v(on_, x_), p(on_, p_, 1), q(on_, q_);
    const GpuMatrix matrix{.of = matrix_, .x = v.data(), .p = p.data(), .own_q = q.data()};
    on_.run(on_.api.right_factor(&matrix, 1, on_.stream), "right_factor");
    expect(q, expected, "right factor");
  }
  void orthonormalise() {
    Floats expected = p_;
    std::vector<double> room;
    codec::orthonormalise(of_, expected, room);
    const DeviceArray<float> p(on_, p_, 1);
    const DeviceArray<double> own(on_, std::vector<double>(p_.size()));
    const GpuMatrix matrix{.of = matrix_, .p = p.data(), .room = own.data()};
    on_.run(on_.api.orthonormalise(&matrix, 1, on_.stream), "orthonormalise");
    expect(p, expected, "orthonormal columns");
  }
  void product() {
    const Floats own_q = tiny(draw_floats(q_.size(), Data::kNormal, random_));
    const float factor = 1.0F / 3, scale = 1 / kHeadroom, own_scale = 0.5F / kHeadroom;
    Floats y(x_.size()), error(x_.size());
    codec::kernels().lowrank.product({p_.data(), q_.data(), factor * scale, y.data(), own_q.data(),
                                      own_scale, x_.data(), error.data()},
                                     of_);
    const DeviceArray<float> v(on_, x_, 1), p(on_, p_), q(on_, q_), own(on_, own_q), e(on_, x_),
        scales(on_, Floats{scale, own_scale});
    const DeviceArray<GpuKeyState> key_state(on_, {GpuKeyState{}});
    const SpanFeedback span_feedback{{p.data(), e.data()}, key_state.data()};
    const GpuMatrix matrix{.of = matrix_,
                           .x = v.data(),
                           .y = v.data(),
                           .span_feedback = span_feedback,
                           .p = p.data(),
                           .q = q.data(),
                           .own_q = own.data(),
                           .scales = scales.data()};
    on_.run(on_.api.product(&matrix, 1, factor, on_.stream), "product");
    expect(v, y, "product");
    expect(e, error, "residual");
  }

 private:
  void expect(const DeviceArray<float>& actual, const Floats& expected, const char* what) {
    bool intact = true;
    row_.expect_same(with_one_nan(actual.values(intact)), with_one_nan(expected), what);
    row_.expect(intact, "written beyond an array");
  }

  const Device& on_;
  const Factors of_;
  Row& row_;
  const Factors matrix_;
  std::mt19937_64 random_;
  Floats x_, residual_, q_, p_;
};

// Of one block and of several, with a last value that decides. Scales are as start_factor() leaves
// them.
void check_headroom(const Device& on, std::size_t n, Row& row) {
  std::mt19937_64 random(n);
  for (const float last : {1.0F, 0x1.1p64F, std::numeric_limits<float>::quiet_NaN()}) {
    Floats q = draw_floats(n, Data::kNormal, random);
    q.back() = last;
    const DeviceArray<float> on_device(on, q, 1), scale(on, Floats{0});
    const GpuMatrix matrix{.of = {0, n, 1}, .q = on_device.data(), .scales = scale.data()};
    on.run(on.api.take_headroom(&matrix, 1, on.stream), "take_headroom");
    const float expected = codec::take_headroom(q);
    bool intact = true;
    row.expect_same(with_one_nan(on_device.values(intact)), with_one_nan(q), "headroom");
    row.expect_same(scale.values(intact), Floats{expected}, "the scale of a factor");
    row.expect(intact, "written beyond an array");
  }
}

}  // namespace

void check_elements(const Device& on, bool small, const Guarded& guarded) {
  const std::vector<std::size_t> lengths =
      small ? std::vector<std::size_t>{1, 2049} : std::vector<std::size_t>{1, 4097, 1'000'013};
  std::mt19937_64 random(3);
  for (int d = 0; d < kDTypes; ++d)
    guarded("fold", std::string(name_of(static_cast<DType>(d))), [&](Row& row) {
      for (const std::size_t n : lengths)
        for (int op = 0; op < kReduceOps; ++op) {
          const auto dtype = static_cast<DType>(d);
          if (!is_defined(static_cast<ReduceOp>(op), dtype)) continue;
          const Data data = op % 2 == 0 ? Data::kRandomBits : Data::kSpecial;
          const Elements of{dtype, op, n, draw_elements(dtype, n, data, random),
                            draw_elements(dtype, n, data, random)};
          check_fold(on, of, n % 2, row);
          check_fold_of_three(on, of, row);
        }
    });
}

void check_matrices(const Device& on, bool small, const Guarded& guarded) {
  guarded("lowrank", "headroom", [&](Row& row) {
    for (const std::size_t n : {100, 40'000}) check_headroom(on, n, row);
  });
  std::vector<Factors> shapes = {{1, 1, 1}, {7, 17, 3}, {33, 65, 4}};
  if (!small) shapes.insert(shapes.end(), {{31, 4100, 16}, {1100, 9, 2}, {1000, 1777, 4}});
  for (const Factors& of : shapes)
    guarded("lowrank", std::to_string(of.rows) + "x" + std::to_string(of.columns), [&](Row& row) {
      for (const Data data : {Data::kNormal, Data::kHuge, Data::kDenormal}) {
        MatrixCheck check(on, of, data, row);
        check.left();
        check.right();
        check.orthonormalise();
        check.product();
      }
    });
}

}  // namespace gradwire::cuda
