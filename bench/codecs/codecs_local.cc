// What one rank computes for one bucket, for codecs_compared.py, which builds and runs this.
// A line of the input is a codec, rows and columns of the bucket, and 1 where losses are fed back;
// a line of the output the seconds, of this thread's processor time, of one encode and one decode.
// lowrank has no payload: its work is all that a rank computes between the sums.
#include <cstdio>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "aligned.h"
#include "gradwire/codec/codec.h"
#include "gradwire/codec/lowrank.h"
#include "gradwire/codec/simd/simd.h"
#include "stopwatch.h"

namespace {

using namespace gradwire::codec;
using Values = std::vector<float>;

struct Bucket {
  std::size_t rows, columns;
  Values x, residual, error, y;

  Bucket(std::size_t height, std::size_t width)
      : rows(height), columns(width), x(height * width), residual(x.size()), error(x), y(x) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (float& each : x) each = normal(random);
    for (float& each : residual) each = 0.1F * normal(random);
  }
};

// Of the same values every time: the error is written beside the residual.
double by_payload(const Codec& codec, bool feedback, Bucket& of) {
  std::vector<std::byte> payload(codec.max_bytes(of.x.size()));
  static CodecState codec_state;  // from call to call: topk's filter
  const EncodeContext context{.residual = feedback ? of.residual.data() : nullptr,
                              .error = feedback ? of.error.data() : nullptr,
                              .codec_state = &codec_state};
  if (feedback) codec.prepare(of.x.data(), of.x.size(), context);
  const double start = now();
  const std::size_t size = codec.encode(of.x.data(), of.x.size(), context, payload);
  codec.decode({payload.data(), size}, of.y.data(), of.x.size());
  return now() - start;
}

double by_factors(std::size_t rank, Bucket& of) {
  static Values q;  // from call to call
  static std::vector<double> room;
  const Factors shape{of.rows, of.columns, rank};
  q.resize(rank * of.columns);
  Values p(rank * of.rows), own_q(q.size());
  const double start = now();
  start_factor(q, shape, q);
  kernels().lowrank.left(of.x.data(), of.residual.data(), of.y.data(), q.data(), p.data(), shape);
  orthonormalise(shape, p, room);
  kernels().lowrank.right(of.y.data(), p.data(), own_q.data(), shape);
  q = own_q;  // the sum over one rank
  const float own_scale = take_headroom(own_q), scale = take_headroom(q);
  kernels().lowrank.product({p.data(), q.data(), scale, of.y.data(), own_q.data(), own_scale,
                             of.y.data(), of.error.data()},
                            shape);
  return now() - start;
}

}  // namespace

int main() {
  const FloatEnvironment environment;
  std::string codec;
  std::size_t rows = 0, columns = 0;
  bool feedback = false;
  Bucket bucket(0, 0);
  while (std::cin >> codec >> rows >> columns >> feedback) {
    if (bucket.rows != rows || bucket.columns != columns) bucket = Bucket(rows, columns);
    const double seconds = codec == "lowrank" ? by_factors(4, bucket)
                                              : by_payload(*make_codec(codec), feedback, bucket);
    std::printf("%.9f\n", seconds);
    std::fflush(stdout);
  }
}
