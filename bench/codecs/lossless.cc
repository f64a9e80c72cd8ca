// The codec lossless on the arrays of a file, for lossless.py, which builds and runs this: packed
// and unpacked in pieces of a message, as links send them.
//   input, a line each: the dtype, and the file of its elements
//   output: bytes, packed bytes, and seconds of this thread's processor time to pack and to unpack
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "gradwire/base/wire.h"
#include "gradwire/codec/lossless.h"
#include "stopwatch.h"

namespace {

using namespace gradwire;

constexpr std::size_t kPiece = kUsualFrame - sizeof(FrameHeader);
constexpr int kRounds = 15;

std::vector<std::byte> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
  std::vector<std::byte> all(bytes.size());
  std::memcpy(all.data(), bytes.data(), bytes.size());
  return all;
}

struct Piece {
  ConstBytes plain;
  std::vector<std::byte> packed;
};

void measure(DType dtype, const std::vector<std::byte>& all) {
  std::vector<Piece> pieces;
  for (std::size_t at = 0; at < all.size(); at += kPiece)
    pieces.push_back({ConstBytes(all).subspan(at, std::min(kPiece, all.size() - at)), {}});
  std::size_t bytes = 0;
  for (Piece& piece : pieces) {
    piece.packed.resize(piece.plain.size());
    const std::size_t packed = codec::pack(dtype, piece.plain, piece.packed);
    bytes += packed > 0 ? packed : piece.plain.size();
    if (packed > 0) piece.packed.resize(packed);
    if (packed == 0) piece.packed.clear();
  }
  std::vector<std::byte> room(kPiece);
  std::vector<double> to_pack, to_unpack;
  bool same = true;
  for (int round = 0; round < kRounds; ++round) {
    to_pack.push_back(seconds(1, [&] {
      for (const Piece& each : pieces) codec::pack(dtype, each.plain, room);
    }));
    to_unpack.push_back(seconds(1, [&] {
      for (const Piece& each : pieces)
        if (!each.packed.empty()) codec::unpack(each.packed, Bytes(room).first(each.plain.size()));
    }));
  }
  for (const Piece& each : pieces) {
    if (each.packed.empty()) continue;
    codec::unpack(each.packed, Bytes(room).first(each.plain.size()));
    same = same && std::memcmp(room.data(), each.plain.data(), each.plain.size()) == 0;
  }
  std::printf("%zu %zu %.9g %.9g\n", all.size(), same ? bytes : 0, median(to_pack),
              median(to_unpack));
  std::fflush(stdout);
}

}  // namespace

int main() {
  std::string dtype, path;
  while (std::cin >> dtype >> path) measure(parse_dtype(dtype), read(path));
}
