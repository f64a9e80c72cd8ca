// Averages an array over four ranks, which are threads of this program. In a clone:
//   cmake -S examples/cpp -B build/example && cmake --build build/example -j
//   build/example/all_reduce
#include <cstdio>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "gradwire/gradwire.h"

int main() {
  constexpr int kRanks = 4;
  std::vector<gradwire::RankSockets> sockets = gradwire::connected_sockets(kRanks);
  std::vector<std::jthread> ranks;
  for (auto& own : sockets)
    ranks.emplace_back([&own, rank = static_cast<int>(&own - sockets.data())] {
      const auto comm = gradwire::join(rank, std::move(own));
      std::vector<float> x(1'000'000, static_cast<float>(rank));
      gradwire::all_reduce(*comm, std::span(x), {.op = gradwire::ReduceOp::kAvg});
      std::printf("rank %d of %d: the average is %g\n", rank, kRanks, static_cast<double>(x[0]));
      comm->close(/*timeout=*/10);
    });
}
