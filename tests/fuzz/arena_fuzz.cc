// Shared memory that the peer writes what it likes into, whenever it likes: its own arena and ours,
// which it has too.
//   input: 1 byte, what the peer passes in place of its arena; then the peer's and our acts
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <optional>

#include "fuzz.h"
#include "gradwire/transport/memory/arena.h"
#include "gradwire/transport/transport.h"

namespace gradwire::fuzz {
namespace {

const transport::LinkOptions kOptions{.rank = 0, .size = 2, .max_message = 128, .messages = 2};
constexpr std::size_t kHeaders = 4096;  // what lies before the cells of so small an arena

transport::LinkOptions peer_options() {
  transport::LinkOptions options = kOptions;
  options.rank = 1;
  return options;
}

// The first pages of an arena, in the peer's hands.
class Grip {
 public:
  explicit Grip(int memory)
      : base_(::mmap(nullptr, kHeaders, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0)) {
    require(base_ != MAP_FAILED);
  }
  ~Grip() { ::munmap(base_, kHeaders); }
  Grip(const Grip&) = delete;
  Grip& operator=(const Grip&) = delete;
  void write(std::size_t word, std::uint64_t value) {
    std::memcpy(static_cast<std::byte*>(base_) + word % (kHeaders / 8) * 8, &value, sizeof value);
  }

 private:
  void* base_;
};

// One byte, with any number of descriptors.
void pass(const UniqueFd& socket, const std::vector<int>& descriptors) {
  char payload = 'M';
  iovec part{&payload, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    const std::size_t bytes = descriptors.size() * sizeof(int);
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(bytes);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(bytes);
    std::memcpy(CMSG_DATA(header), descriptors.data(), bytes);
  }
  require(::sendmsg(socket.get(), &message, MSG_NOSIGNAL) == 1);
}

// The descriptor that rank 0 passed after its hello.
UniqueFd take_descriptor(const UniqueFd& socket) {
  char bytes[1024];
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  const std::size_t hello = hello_of("shm", kOptions, 0, 1).size();
  require(::recv(socket.get(), bytes, hello, 0) == static_cast<ssize_t>(hello));
  iovec part{bytes, 1};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  require(::recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC) == 1);
  int descriptor = -1;
  std::memcpy(&descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof descriptor);
  return UniqueFd(descriptor);
}

void pass_something(const UniqueFd& peer, unsigned kind, const transport::Arena& arena) {
  const UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  switch (kind % 6) {
    case 0:
      return pass(peer, {});
    case 1:
      return pass(peer, {arena.descriptor(), null.get()});
    case 2:
      return pass(peer, {null.get()});
    default:
      return pass(peer, {arena.descriptor()});
  }
}

// Rank 0's link, and all that the peer has in its hands.
struct Scene {
  Scene(unsigned kind, std::uint64_t magic)
      : transport(transport::make_transport("shm", kOptions)),
        arena(transport::Arena::create(peer_options())),
        theirs(arena->descriptor()) {
    auto [own, other] = socket_pair();
    peer = std::move(other);
    if (kind % 6 == 3) theirs.write(0, magic);
    say(peer, hello_of("shm", kOptions, 1, 0));
    pass_something(peer, kind, *arena);
    transport->adopt(std::move(own), 1, 0);
    memory = take_descriptor(peer);
    ours.emplace(memory.get());
  }

  std::unique_ptr<transport::Transport> transport;
  std::shared_ptr<transport::Arena> arena;
  Grip theirs;
  UniqueFd peer, memory;
  std::optional<Grip> ours;
};

void receive(transport::Transport& transport) {
  const auto message = transport.peek(1);
  if (!message) return;
  require(message->size() <= kOptions.max_message);
  const std::vector<std::byte> copy(message->begin(), message->end());
  transport.release(1);
}

void send(transport::Transport& transport, std::size_t bytes) {
  const Rank peers[] = {1};
  const Bytes staging = transport.reserve(peers, bytes);
  if (staging.data() == nullptr) return;
  std::fill(staging.begin(), staging.end(), std::byte{1});
  transport.commit(bytes);
}

void act(Scene& scene, Input& input) {
  switch (input.number<std::uint8_t>() % 7) {
    case 0: {
      const auto word = input.number<std::uint16_t>();
      return scene.theirs.write(word, input.number<std::uint64_t>());
    }
    case 1: {
      const auto word = input.number<std::uint16_t>();
      return scene.ours->write(word, input.number<std::uint64_t>());
    }
    case 2:
      return receive(*scene.transport);
    case 3:
      return send(*scene.transport, input.number<std::uint8_t>() % (kOptions.max_message + 1));
    case 4:
      scene.transport->arm();
      return scene.transport->disarm();
    case 5:
      return say(scene.peer, input.take(1));
    default:
      return scene.peer.reset();
  }
}

}  // namespace
}  // namespace gradwire::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace gradwire::fuzz;
  const NoDescriptorLeft none;
  Input input(data, size);
  expect_typed([&] {
    const auto kind = input.number<std::uint8_t>();
    Scene scene(kind, input.number<std::uint64_t>());
    while (!input.empty()) act(scene, input);
  });
  return 0;
}
