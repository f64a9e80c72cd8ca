// Error feedback on one GPU: codec/feedback/feedback.h's residuals, and what codecs adapt and
// remember, in device memory, so that a call needs nothing of the host. The device decides by the
// call's flags whether a call's residuals replace those before.
//
// Each key has two vectors; its GpuKeyState says which one is current (cuda/api.h). One thread at a
// time uses it. Its calls follow each other in stream order; whoever changes streams orders them.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gradwire/codec/feedback/feedback.h"
#include "gradwire/cuda/device.h"

namespace gradwire::cuda {

class GpuFeedback {
 public:
  struct DeviceKey {
    GpuKeyState* key_state = nullptr;
    float* residual[2] = {nullptr, nullptr};
    std::uint64_t count = 0;  // elements
    float* memory[2] = {nullptr, nullptr};
    std::uint64_t remembered = 0;  // elements of memory
    std::uint64_t digest = 0;      // hash of the name, for Int8Rounding

    SpanFeedback span_feedback(std::uint64_t offset) const {
      return {{residual[0] + offset, residual[1] + offset}, key_state};
    }
  };
  static constexpr std::size_t kMostTables = 4096;
  // The keys of a call, in order.
  struct KeyTable {
    std::vector<const DeviceKey*> keys;
    GpuKeyState* const* key_states = nullptr;  // in device memory
  };

  // Works on this thread's device. A new key starts with what the host's error feedback holds for
  // it.
  GpuFeedback(const Api& api, std::shared_ptr<codec::ErrorFeedback> host);
  ~GpuFeedback();  // waits for the device
  // Returns a number that no other GpuFeedback of the process has, or had.
  std::uint64_t number() const noexcept { return number_; }
  GpuFeedback(const GpuFeedback&) = delete;
  GpuFeedback& operator=(const GpuFeedback&) = delete;

  // Throws InvalidArgument for a key whose residual has another length, here or at the host's error
  // feedback, and for one that is given twice.
  void require_fits(std::span<const codec::KeyedArray> arrays) const;
  // Finds the keys of a call, for which require_fits() did not throw, and makes new ones. Throws
  // InvalidArgument for a new one in a call that is captured. A table stays valid until kMostTables
  // others were made, and then for as long as a step has it.
  const KeyTable& open(std::span<const codec::KeyedArray> arrays, const CallStream& stream);
  // Makes room for the memory of each key: `counts` elements.
  void remember(const KeyTable& table, std::span<const std::uint64_t> counts,
                const CallStream& stream);

  // Begin and end a step: the residuals of all calls in between are kept, or none. They throw
  // InvalidArgument if a step is (or is not) under way. `stream` must be that of the last call.
  void begin_step();
  void end_step(bool keep, Stream stream);
  // Makes the step under way fail if x holds NaN or Inf: it is not kept then.
  void require_finite(const float* x, std::uint64_t count, Stream stream);
  // Copies the flags of the step under way, as its calls have left them, into device memory.
  void copy_flags(std::uint32_t* to, Stream stream);
  bool in_step() const noexcept { return in_step_; }
  // Ends a call, or joins it to the step under way. The flags decide whether it is kept; in a step,
  // the step's flags.
  void settle(const KeyTable& table, bool remembers, const std::uint32_t* flags, Stream stream);
  std::uint32_t* step_flags() const noexcept { return step_flags_; }

  // Multiplies all residuals, and what codecs have adapted to them, on the device: after the last
  // call, and before the next one, neither of which waits. `now` may be a loss scale in device
  // memory, as the stream `after` leaves it, or null: residuals then follow it too, from what it
  // was at the last such call. Returns false, and does nothing, where calls were captured: nobody
  // knows which streams replay them.
  bool scale(double factor, const float* now, Stream after);
  // An array in device memory with an element for each of a key's residual.
  struct Masked {
    std::string key;
    float* data;
    std::uint64_t count;
  };
  // Sets the elements to zero whose residual is zero after the last call, as ErrorFeedback::mask()
  // does; for an unused key, all of them. `stream` must be ordered behind the last call.
  void mask(std::span<const Masked> arrays, Stream stream);

  // Sets what the loss scale was at the last scale(); 0: unknown.
  void set_loss_scale(float last);

  // bring_home() copies all keys to the host's error feedback, so that it can be read or changed
  // there; send_back() copies them back to the same device memory, so that graphs stay valid. Both
  // wait for the whole device, since calls and replays of graphs may be on any stream.
  void bring_home();
  void send_back();

 private:
  struct OwnedKey {
    DeviceKey key;
    std::vector<Room> rooms;
  };
  struct OwnedTable {
    KeyTable table;
    Room key_states;
  };
  void begin_flags(Stream stream);
  void note_end(Stream stream);
  OwnedKey& find(const codec::KeyedArray& array, Stream stream);
  OwnedKey& make(const codec::KeyedArray& array, Stream stream);
  std::unique_ptr<OwnedTable> make_table(Stream stream);
  void evict_tables();
  void make_memory(OwnedKey& owned, std::uint64_t count, Stream stream);
  float* zeros(OwnedKey& owned, std::uint64_t count, Stream stream);
  codec::ErrorFeedback::SavedKey read(const DeviceKey& key, Stream stream) const;
  void write(const DeviceKey& key, const codec::ErrorFeedback::SavedKey& saved,
             Stream stream) const;

  static std::uint64_t next_number() noexcept {
    static std::atomic<std::uint64_t> last = 0;
    return ++last;
  }

  const std::uint64_t number_ = next_number();
  const Api& api_;
  std::shared_ptr<codec::ErrorFeedback> host_;
  std::map<std::string, std::unique_ptr<OwnedKey>> keys_;
  std::vector<std::string> names_;  // of the call that is being opened
  std::map<std::vector<std::string>, std::unique_ptr<OwnedTable>> tables_;
  Room step_room_;
  std::uint32_t* step_flags_ = nullptr;
  bool in_step_ = false;
  bool is_fresh_ = false;  // no call yet: the flags are of the step before
  OwnedStream copies_;     // for copies to and from the host, and for scale()
  OwnedEvent ended_;       // recorded after calls, steps and scale(); those on other streams wait
  bool has_ended_ = false;
  bool was_captured_ = false;
  OwnedEvent scaled_;  // when a loss scale is there
  Room loss_scale_room_;
  float* loss_scale_ = nullptr;  // as scale() last saw it
  struct SettledCall {
    const KeyTable* table;
    bool remembers;
  };
  std::vector<SettledCall> of_step_;
};

}  // namespace gradwire::cuda
