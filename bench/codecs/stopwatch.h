// What the benchmarks of kernels time with. Included by a program's one source file.
#pragma once

#include <algorithm>
#include <cstddef>
#include <ctime>
#include <functional>
#include <vector>

// Of this thread's processor time: others that run in between do not count.
inline double now() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Of one call, the mean of so many.
inline double seconds(int repeats, const std::function<void()>& work) {
  const double start = now();
  for (int i = 0; i < repeats; ++i) work();
  return (now() - start) / repeats;
}

inline double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}
