// A multimap from hashes to numbers of 42 bits, in about 10 bytes an entry. It keeps 32 bits of each hash alone, so
// that whoever visits an entry compares the whole key itself.
//
// Invariants of a shard: entries lie in the order of their tags, none before its home, which is its tag's share of
// `homes`, and nothing empty lies between an entry and its home. So nothing but the entries is needed to move them, and
// a search ends at the first greater tag. Shards grow and shrink one by one, by an eighth or so: no call takes long,
// and memory follows what is there.
//
// Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tutti {

class TagTable {
 public:
  static constexpr uint32_t kValueBits = 42;

  // 2^`shard_bits` shards, at most 2^10.
  explicit TagTable(uint32_t shard_bits) : shards_(size_t{1} << shard_bits) {}

  // `value` is not 0. The same pair may be there several times.
  void insert(uint64_t hash, uint64_t value);
  // Removes one such pair, which has to be there.
  void erase(uint64_t hash, uint64_t value);
  // Calls visit(value) for each entry whose tag is the hash's, until it returns false.
  template <typename Visit>
  void visit(uint64_t hash, Visit visit) const;

  [[nodiscard]] uint64_t size() const noexcept { return size_; }
  [[nodiscard]] uint64_t memory_bytes() const noexcept;

 private:
  // An entry is a tag above a value; 0 is none. The last one of a shard is always empty.
  struct Shard {
    std::vector<uint64_t> entries;
    uint32_t homes = 0;
    uint32_t size = 0;
  };
  static constexpr uint32_t kTagBits = 64 - kValueBits;

  [[nodiscard]] size_t shard_of(uint64_t hash) const noexcept { return (hash >> 54U) & (shards_.size() - 1); }
  static uint64_t tag_of(uint64_t hash) noexcept { return (hash >> 32U) & ((uint64_t{1} << kTagBits) - 1); }
  static uint64_t home(uint64_t tag, uint32_t homes) noexcept { return (tag * homes) >> kTagBits; }
  static void rebuild(Shard& shard, uint32_t spare);

  std::vector<Shard> shards_;
  uint64_t size_ = 0;
};

template <typename Visit>
void TagTable::visit(uint64_t hash, Visit visit) const {
  const Shard& shard = shards_[shard_of(hash)];
  if (shard.size == 0) {
    return;
  }
  const uint64_t tag = tag_of(hash);
  const uint64_t* at = &shard.entries[home(tag, shard.homes)];
  while (*at != 0 && *at >> kValueBits < tag) {
    ++at;
  }
  for (; *at != 0 && *at >> kValueBits == tag; ++at) {
    if (!visit(*at & ((uint64_t{1} << kValueBits) - 1))) {
      return;
    }
  }
}

}  // namespace tutti
