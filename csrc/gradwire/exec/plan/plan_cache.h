// PlanCache: returns the plan of a request, and allocates only for a new shape. By a cost model it
// also decides what algorithm="auto" means, from what all ranks know alike; then the model's digest
// is part of what the ranks must agree on.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "gradwire/exec/plan/plan.h"
#include "gradwire/exec/plan/request.h"
#include "gradwire/schedule/cost.h"

namespace gradwire::exec {

// Returns schedule::default_model() with what the transports that connect ranks of one host and of
// different hosts, and each codec, say of their own speed: the model by which algorithms are chosen
// until the ranks have measured one. Throws InvalidArgument for an unknown transport.
schedule::CostModel built_in_model(std::string_view within, std::string_view between, int cores);

// Adds the codec's time, and the bytes that it leaves, to the question. A plain codec adds nothing.
void ask_for(const codec::Codec& codec, const schedule::CostModel& model,
             schedule::Question& question);

class PlanCache {
 public:
  struct Setting {
    Rank rank = 0;
    int size = 1;
    std::vector<std::vector<Rank>> hosts;
    std::size_t max_message = 0;
    std::size_t segment_bytes = 0;
    schedule::Sites sites = {};
  };
  explicit PlanCache(Setting setting);

  // Sets the model behind algorithm="auto", on all ranks, between two calls. Until then it is the
  // built-in one of shared memory and TCP, with a core for every rank.
  void set_model(schedule::CostModel model);
  // Likewise the sites, of which there is one until then.
  void set_sites(schedule::Sites sites);
  bool has_sites() const noexcept { return setting_.sites.ranks.size() > 1; }

  // Returns the codec of a call, which is none for one that only encodes between sites if there is
  // one site.
  std::shared_ptr<const codec::Codec> codec_for(const Request& request) const;

  // Returns the request's plan. Throws ScheduleError or InvalidArgument if there is no valid one.
  std::shared_ptr<const Plan> find(const Request& request, const std::vector<int>& link_of);

 private:
  struct Key {
    std::uint64_t digest = 0;  // of the counts, for a quick comparison
    Collective collective;
    DType dtype;
    ReduceOp op;
    Rank root = 0;
    std::string algorithm;
    std::uint64_t schedule_digest = 0;
    const codec::Codec* codec = nullptr;  // kept alive by the plan
    std::string codec_label;
    std::string moved;
    std::vector<std::uint64_t> counts;
  };
  struct CachedPlan {
    Key key;
    std::shared_ptr<const Plan> plan;
  };
  bool matches(const Key& key, const Request& request, std::uint64_t digest) const;
  std::shared_ptr<const Plan> make(const Request& request, const std::vector<int>& link_of,
                                   std::uint64_t digest);
  // What a choice depends on, besides the setting and the model.
  struct ChoiceKey {
    Collective collective;
    Rank root = 0;
    double bytes = 0;
    const codec::Codec* codec = nullptr;  // kept alive by the cached choice
    bool spares_bytes = false;
    bool operator==(const ChoiceKey&) const = default;
  };
  struct CachedChoice {
    ChoiceKey key;
    std::shared_ptr<const codec::Codec> codec;
    schedule::Choice choice;
  };
  void forget();
  schedule::Schedule schedule_for(const Request& request, const schedule::Choice& choice) const;
  schedule::Choice choose(const Request& request);
  const schedule::Choice& choose(Collective collective, double bytes, const Request& request);

  Setting setting_;
  schedule::CostModel model_;
  schedule::CostModel slow_model_;  // for Request::spares_bytes
  std::uint64_t model_digest_ = 0;
  std::vector<CachedPlan> plans_;
  std::vector<CachedChoice> choices_;
  std::vector<std::uint64_t> counts_;  // of the request being looked up
};

}  // namespace gradwire::exec
