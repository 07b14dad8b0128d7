#include "tutti/tag_table.h"

#include <algorithm>

namespace tutti {
namespace {

constexpr uint32_t kFewest = 8;

}  // namespace

void TagTable::insert(uint64_t hash, uint64_t value) {
  Shard& shard = shards_[shard_of(hash)];
  if (shard.size >= shard.homes - shard.homes / 8) {
    rebuild(shard, 0);
  } else if (shard.entries[shard.entries.size() - 2] != 0) {
    rebuild(shard, shard.size / 8);
  }
  const uint64_t tag = tag_of(hash);
  uint64_t at = home(tag, shard.homes);
  while (shard.entries[at] != 0 && shard.entries[at] >> kValueBits <= tag) {
    ++at;
  }
  uint64_t end = at;
  while (shard.entries[end] != 0) {
    ++end;
  }
  std::copy_backward(shard.entries.begin() + static_cast<int64_t>(at),
                     shard.entries.begin() + static_cast<int64_t>(end),
                     shard.entries.begin() + static_cast<int64_t>(end + 1));
  shard.entries[at] = tag << kValueBits | value;
  ++shard.size;
  ++size_;
}

void TagTable::erase(uint64_t hash, uint64_t value) {
  Shard& shard = shards_[shard_of(hash)];
  const uint64_t tag = tag_of(hash);
  const uint64_t entry = tag << kValueBits | value;
  uint64_t at = home(tag, shard.homes);
  while (shard.entries[at] != entry) {
    ++at;
  }
  while (shard.entries[at + 1] != 0 && home(shard.entries[at + 1] >> kValueBits, shard.homes) <= at) {
    shard.entries[at] = shard.entries[at + 1];
    ++at;
  }
  shard.entries[at] = 0;
  --shard.size;
  --size_;
  if (shard.homes > kFewest && shard.size < shard.homes - shard.homes / 4 - shard.homes / 16) {
    rebuild(shard, 0);
  }
}

uint64_t TagTable::memory_bytes() const noexcept {
  uint64_t bytes = shards_.size() * sizeof(Shard);
  for (const Shard& shard : shards_) {
    bytes += shard.entries.capacity() * sizeof(uint64_t);
  }
  return bytes;
}

// Room for a quarter more than there are; `spare`: entries more behind the last home.
void TagTable::rebuild(Shard& shard, uint32_t spare) {
  const uint32_t homes = std::max(kFewest, shard.size + shard.size / 4);
  const auto place = [&](auto put) {
    uint64_t next = 0;
    for (const uint64_t entry : shard.entries) {
      if (entry != 0) {
        next = std::max(next, home(entry >> kValueBits, homes));
        put(next++, entry);
      }
    }
    return next;
  };
  const uint64_t end = place([](uint64_t, uint64_t) {});
  std::vector<uint64_t> entries(std::max<uint64_t>(end, homes) + kFewest + spare);
  place([&](uint64_t at, uint64_t entry) { entries[at] = entry; });
  shard.entries = std::move(entries);
  shard.homes = homes;
}

}  // namespace tutti
