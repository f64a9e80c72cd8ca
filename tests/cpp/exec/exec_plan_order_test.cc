// In which order frames go and land: what the header of Plan promises, for all generators.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "gradwire/codec/codec.h"
#include "gradwire/exec/plan/plan.h"
#include "gradwire/schedule/frames.h"
#include "schedule_catalogue.h"

namespace gradwire::exec {
namespace exec_plan_order_test {

using schedule::Recipe;
using schedule::Schedule;

constexpr std::size_t kRoom = 8192, kSegment = 4096;  // bytes: of a frame, at most and wanted

bool each_knows_its_own(Collective collective) {
  return collective == Collective::kGather || collective == Collective::kScatter ||
         collective == Collective::kAllToAll;
}

// Extents of unlike sizes, so that there are several segments, and chunks without elements.
std::vector<std::uint64_t> counts_of(const Recipe& recipe) {
  const auto p = static_cast<std::size_t>(recipe.ranks);
  std::size_t arrays = p;
  if (recipe.collective == Collective::kAllToAll) arrays = p * p;
  std::vector<std::uint64_t> counts;
  for (std::size_t i = 0; i < arrays; ++i)
    counts.push_back(i % 4 == 1 ? 0 : 9000 + i * 2311 % 7001);
  return counts;
}

// All ranks' plans of one call. Peers lie on two transports.
struct Job {
  Recipe recipe;
  std::string codec;
  std::vector<Plan> plans;

  Job(const Recipe& made, const std::string& codec_spec) : recipe(made), codec(codec_spec) {
    const Schedule schedule = schedule::generate(recipe);
    for (Rank rank = 0; rank < recipe.ranks; ++rank) {
      Binding binding;
      binding.spec.collective = recipe.collective;
      binding.spec.root = recipe.root;
      binding.counts = counts_of(recipe);
      binding.uniform_segments = !each_knows_its_own(recipe.collective);
      binding.rank = rank;
      binding.codec = codec::make_codec(codec);
      binding.in_tree = schedule::verify(schedule).in_tree;
      binding.max_message = kRoom + sizeof(FrameHeader);
      binding.segment_bytes = kSegment;
      for (Rank peer = 0; peer < recipe.ranks; ++peer) binding.link_of.push_back(peer % 2);
      plans.emplace_back(schedule, binding);
    }
  }
  std::string text() const { return label(recipe) + " " + codec; }
};

void for_each_job(const auto& check) {
  for (const Recipe& recipe : schedule::all_recipes(/*most_ranks=*/6)) {
    check(Job(recipe, "none"));
    if (!reduces(recipe.collective) || !schedule::verify(schedule::generate(recipe)).in_tree)
      continue;
    for (const char* codec : {"int8", "fp16"}) check(Job(recipe, codec));
  }
}

// Returns how many of `frames`, up to the last of that segment and of a round before `round`.
std::uint32_t up_to_round(const auto& frames, std::uint32_t segment, int round) {
  std::uint32_t count = 0;
  for (std::size_t i = 0; i < frames.size(); ++i)
    if (frames[i].segment == segment && frames[i].round < round)
      count = static_cast<std::uint32_t>(i + 1);
  return count;
}

// A send reads what landed in the rounds before; what lands in its own round comes after it. No
// frame waits for more than that: two ranks would wait for each other.
TEST(PlanOrder, FramesWaitForTheirOwnSegmentsEarlierRounds) {
  std::size_t waits = 0;
  for_each_job([&](const Job& job) {
    for (const Plan& plan : job.plans) {
      for (const SendFrame& each : plan.sends())
        EXPECT_EQ(each.after_receives, up_to_round(plan.receives(), each.segment, each.round))
            << job.text();
      for (const ReceiveFrame& each : plan.receives()) {
        EXPECT_EQ(each.after_sends, up_to_round(plan.sends(), each.segment, each.round + 1))
            << job.text();
        waits += each.after_sends > 0;
      }
    }
  });
  EXPECT_GT(waits, 1000U);
}

TEST(PlanOrder, IsOneWavefrontInBothDirections) {
  for_each_job([](const Job& job) {
    const auto place = [](const Frame& frame) {
      EXPECT_EQ(frame.start, frame.round * static_cast<unsigned>(schedule::kLag));
      return std::pair(frame.start + frame.segment, frame.segment);
    };
    for (const Plan& plan : job.plans) {
      EXPECT_TRUE(std::ranges::is_sorted(plan.sends(), {}, place)) << job.text();
      EXPECT_TRUE(std::ranges::is_sorted(plan.receives(), {}, place)) << job.text();
    }
  });
}

// What both ends of a message must know without a word: when it comes, and what is in it.
std::string told(const Plan& plan, const Frame& frame) {
  std::string text = std::to_string(frame.round) + " " + std::to_string(frame.segment) + "/" +
                     std::to_string(frame.segments) + " " + std::to_string(frame.bytes);
  for (const Chunk& chunk : plan.chunks(frame)) {
    text += chunk.landing == schedule::Landing::kCopy ? " copy" : " reduce";
    for (const Span& span : plan.spans(chunk))
      text += " " + std::to_string(span.array) + ":" + std::to_string(span.offset) + "+" +
              std::to_string(span.count);
  }
  return text;
}

std::vector<std::string> told_of(const Plan& plan, const auto& frames, Rank peer) {
  std::vector<std::string> all;
  for (const Frame& frame : frames)
    if (std::ranges::find(plan.peers(frame), peer) != plan.peers(frame).end())
      all.push_back(told(plan, frame));
  return all;
}

TEST(PlanOrder, BothEndsOfALinkExpectTheSameFrames) {
  for_each_job([](const Job& job) {
    for (Rank from = 0; from < job.recipe.ranks; ++from)
      for (Rank to = 0; to < job.recipe.ranks; ++to) {
        const Plan& source = job.plans[static_cast<std::size_t>(from)];
        const Plan& target = job.plans[static_cast<std::size_t>(to)];
        EXPECT_EQ(told_of(source, source.sends(), to), told_of(target, target.receives(), from))
            << job.text() << ", from " << from << " to " << to;
        EXPECT_EQ(source.bytes_to(to), target.bytes_from(from)) << job.text();
      }
  });
}

// Returns a plan's frames, sends before receives.
std::vector<const Frame*> all_frames(const Plan& plan) {
  std::vector<const Frame*> all;
  for (const Frame& each : plan.sends()) all.push_back(&each);
  for (const Frame& each : plan.receives()) all.push_back(&each);
  return all;
}

std::uint64_t payload(const Plan& plan, const Frame& frame) {
  std::uint64_t bytes = 0;
  for (const Chunk& chunk : plan.chunks(frame))
    for (const Span& span : plan.spans(chunk))
      bytes += plan.lossy() ? plan.codec().max_bytes(span.count) : span.count * sizeof(float);
  return bytes;
}

TEST(PlanOrder, FramesSayTheirBytesAndFitTheirMessage) {
  for_each_job([](const Job& job) {
    for (const Plan& plan : job.plans)
      for (const Frame* frame : all_frames(plan)) {
        EXPECT_EQ(frame->bytes, payload(plan, *frame)) << job.text();
        EXPECT_LE(frame->bytes, kRoom) << job.text();
      }
  });
}

// The frames of each message, by its round and its other end.
using Messages = std::map<std::pair<int, Rank>, std::vector<const Frame*>>;
Messages messages_of(const Plan& plan, const auto& frames) {
  Messages messages;
  for (const Frame& frame : frames)
    for (const Rank peer : plan.peers(frame)) messages[{frame.round, peer}].push_back(&frame);
  return messages;
}

TEST(PlanOrder, TwoRanksExchangeOneMessageARoundWhoseSegmentsAreCounted) {
  for_each_job([](const Job& job) {
    for (const Plan& plan : job.plans)
      for (const Messages& messages :
           {messages_of(plan, plan.sends()), messages_of(plan, plan.receives())})
        for (const auto& [where, message] : messages) {
          EXPECT_EQ(message.size(), message[0]->segments) << job.text();
          std::set<std::uint32_t> segments;
          for (const Frame* each : message) segments.insert(each->segment);
          EXPECT_EQ(segments.size(), message.size()) << job.text();
          EXPECT_LT(*segments.rbegin(), static_cast<std::uint32_t>(plan.segments())) << job.text();
        }
  });
}

// The longest message of all ranks decides, so that it is cut into what was asked for.
TEST(PlanOrder, ACallHasAsManySegmentsAsItsLongestMessageTakes) {
  for_each_job([](const Job& job) {
    if (each_knows_its_own(job.recipe.collective) || job.plans[0].lossy()) return;
    std::uint64_t longest = 0;
    for (const Plan& plan : job.plans)
      for (const auto& [where, message] : messages_of(plan, plan.sends())) {
        std::uint64_t bytes = 0;
        for (const Frame* each : message) bytes += each->bytes;
        longest = std::max(longest, bytes);
      }
    const auto wanted = std::max<std::uint64_t>(1, (longest + kSegment - 1) / kSegment);
    for (const Plan& plan : job.plans)
      EXPECT_EQ(static_cast<std::uint64_t>(plan.segments()), wanted) << job.text();
  });
}

// Where a segment is asked to be shorter than a cache line, it is one.
TEST(PlanOrder, NoSegmentIsEmpty) {
  const auto plan_of = [](std::uint64_t count) {
    Binding binding;
    binding.counts = {count};
    binding.codec = codec::make_codec("none");
    binding.max_message = kRoom;
    binding.segment_bytes = 1;
    return Plan(schedule::all_reduce_by("direct", 3), binding);
  };
  for (const std::uint64_t lines : {1, 3, 4, 30})
    EXPECT_EQ(plan_of(lines * 16).segments(), static_cast<int>((lines + 2) / 3)) << lines;
}

// float32 sums of 16-bit floats, each with a place of its own while it lasts.
TEST(PlanOrder, WideSumsLieWithinTheirRoom) {
  for (const std::string_view algorithm : {"ring", "direct", "binary_tree", "star"}) {
    Binding binding;
    binding.spec.dtype = DType::kBFloat16;
    binding.counts = {1003};
    binding.codec = codec::make_codec("none");
    binding.max_message = kRoom;
    std::size_t most = 0;
    for (binding.rank = 0; binding.rank < 5; ++binding.rank) {
      const Plan plan(schedule::all_reduce_by(algorithm, 5), binding);
      for (const Frame& frame : plan.receives())
        for (const Chunk& chunk : plan.chunks(frame)) {
          if (chunk.wide.place == WideFold::kNone) continue;
          std::size_t elements = 0;
          for (const Span& span : plan.spans(chunk)) elements += span.count;
          const std::size_t first = plan.wide_offset(chunk.wide);
          EXPECT_EQ(first % 16, 0U) << algorithm << ": cache lines";
          EXPECT_LE(first + elements, plan.wide_elements()) << algorithm;
          most = std::max(most, elements);
        }
      EXPECT_EQ(plan.wide_elements() % 16, 0U) << algorithm;
    }
    EXPECT_EQ(most > 0, algorithm != "ring") << algorithm << ": a ring has single addends alone";
  }
}

// No two segments share a cache line, nor a unit of the codec.
TEST(PlanOrder, CutsStandAtCacheLines) {
  for_each_job([](const Job& job) {
    const std::size_t unit = std::lcm(std::size_t{16}, job.plans[0].codec().block());
    for (const Plan& plan : job.plans)
      for (const Frame& frame : plan.sends())
        for (const Chunk& chunk : plan.chunks(frame))
          for (const Span& span : plan.spans(chunk)) EXPECT_EQ(span.offset % unit, 0U);
  });
}

TEST(PlanOrder, StoredPayloadsLieSideBySideAtCacheLines) {
  for_each_job([](const Job& job) {
    for (const Plan& plan : job.plans) {
      std::map<std::size_t, std::size_t> ends{{0, 0}};  // by place
      for (const Frame& send : plan.sends())
        for (const Chunk& chunk : plan.chunks(send)) {
          if (chunk.store_index == kNotStored) continue;
          std::size_t bytes = 0;
          for (const Span& span : plan.spans(chunk)) bytes += plan.codec().max_bytes(span.count);
          const std::size_t place = plan.store_offset(chunk.store_index);
          EXPECT_EQ(place % 64, 0U) << job.text();
          ends[place] = std::max(ends[place], place + bytes);
        }
      std::size_t end = 0;
      for (const auto& [place, its_end] : ends) {
        EXPECT_GE(place, end) << job.text();
        EXPECT_LT(place, end + 64) << job.text();
        end = its_end;
      }
      EXPECT_LE(end, plan.store_bytes()) << job.text();
      EXPECT_LT(plan.store_bytes(), end + 64) << job.text();
    }
  });
}

// Readers of the same bytes on one transport read one copy; none is on another.
TEST(PlanOrder, OneSendServesTheReadersOfOneTransport) {
  for_each_job([](const Job& job) {
    for (const Plan& plan : job.plans) {
      std::map<std::string, std::set<int>> links;
      for (const Frame& send : plan.sends()) {
        if (send.bytes == 0) continue;  // chunks without elements look alike
        const auto peers = plan.peers(send);
        for (const Rank peer : peers) EXPECT_EQ(peer % 2, peers[0] % 2) << job.text();
        EXPECT_TRUE(links[told(plan, send)].insert(peers[0] % 2).second) << job.text();
      }
    }
  });
}

// A finished chunk is scaled and encoded once, by the first send of it.
TEST(PlanOrder, EachRankFinishesAChunkOnce) {
  for_each_job([](const Job& job) {
    for (const Plan& plan : job.plans) {
      std::set<std::uint32_t> finished;
      for (const Frame& send : plan.sends())
        for (const Chunk& chunk : plan.chunks(send))
          if (chunk.completes_sum && chunk.spans.first != chunk.spans.last) {
            EXPECT_TRUE(finished.insert(chunk.spans.first).second) << job.text();
          }
      for (const Frame& receive : plan.receives())
        for (const Chunk& chunk : plan.chunks(receive))
          EXPECT_FALSE(chunk.completes_sum) << job.text();
    }
  });
}

}  // namespace exec_plan_order_test
}  // namespace gradwire::exec
