// Exclusive: a value that only its holder, one thread at a time, may use, without a lock. A mutex
// of the owner guards whether there is a holder; functions take its lock as a proof that it is
// held. While there is no holder, whoever has the mutex may use the value.
#pragma once

#include <mutex>
#include <utility>

namespace gradwire::exec {

template <typename Value>
class Exclusive {
 public:
  using Lock = std::unique_lock<std::mutex>;

  // The right to use the value, until it is given back.
  class Holder {
   public:
    Holder() = default;
    Holder(Holder&& other) noexcept : of_(std::exchange(other.of_, nullptr)) {}
    Holder& operator=(Holder&& other) noexcept {
      std::swap(of_, other.of_);
      return *this;
    }

    Value& operator*() const noexcept { return of_->value_; }
    Value* operator->() const noexcept { return &of_->value_; }
    void give_back(const Lock&) noexcept { std::exchange(of_, nullptr)->taken_ = false; }

   private:
    friend Exclusive;
    explicit Holder(Exclusive& of) noexcept : of_(&of) { of.taken_ = true; }
    Exclusive* of_ = nullptr;
  };

  template <typename... Args>
  explicit Exclusive(Args&&... args) : value_(std::forward<Args>(args)...) {}

  bool taken(const Lock&) const noexcept { return taken_; }
  // There must be no holder.
  Holder take(const Lock&) noexcept { return Holder(*this); }
  // Returns the value for as long as the mutex is held; null where it has a holder.
  Value* unless_taken(const Lock&) noexcept { return taken_ ? nullptr : &value_; }
  // Returns the value in a forked child, where there is no other thread.
  Value& after_fork() noexcept { return value_; }

 private:
  Value value_;
  bool taken_ = false;
};

}  // namespace gradwire::exec
