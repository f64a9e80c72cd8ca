#include "gradwire/crypto/seal.h"

#include <cstring>

namespace gradwire::crypto {
namespace {

std::uint32_t length_of(const std::string& record) {
  std::uint32_t length = 0;
  std::memcpy(&length, record.data(), sizeof length);
  return length;
}

void append_record(Aead& sends, std::string_view plain, std::string& out) {
  const auto length = static_cast<std::uint32_t>(plain.size());
  const std::size_t at = out.size();
  out.resize(at + kRecordExtra + plain.size());
  const auto record = std::as_writable_bytes(std::span(out)).subspan(at);
  std::memcpy(record.data(), &length, sizeof length);
  sends.seal(record.first(kRecordHeader), bytes_of(plain), record.data() + kRecordHeader);
}

}  // namespace

std::string Seal::records(std::string_view plain) {
  std::string out;
  for (std::size_t at = 0; at < plain.size(); at += kMostRecord)
    append_record(sends_, plain.substr(at, kMostRecord), out);
  return out;
}

std::optional<std::string> Seal::opened(std::string_view arrived) {
  std::string plain;
  while (!broken_) {
    const std::string_view next = arrived.substr(0, missing());
    arrived.remove_prefix(next.size());
    partial_ += next;
    if (partial_.size() == kRecordHeader) broken_ = length_of(partial_) > kMostRecord;
    if (missing() == 0) open_record(plain);
    if (arrived.empty() && !broken_) return plain;
  }
  return std::nullopt;
}

void Seal::open_record(std::string& plain) {
  const auto record = std::as_writable_bytes(std::span(partial_));
  const std::size_t before = plain.size();
  plain.resize(before + partial_.size() - kRecordExtra);
  broken_ = !receives_.open(record.first(kRecordHeader), record.subspan(kRecordHeader),
                            std::as_writable_bytes(std::span(plain)).data() + before);
  partial_.clear();
}

std::size_t Seal::missing() const noexcept {
  if (partial_.size() < kRecordHeader) return kRecordHeader - partial_.size();
  return kRecordExtra + length_of(partial_) - partial_.size();
}

}  // namespace gradwire::crypto
