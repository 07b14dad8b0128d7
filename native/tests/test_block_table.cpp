// The index against a plain model, by random operations: prefix closure, accounting, generations, lookups.
#include <cstring>
#include <map>
#include <set>
#include <vector>

#include "check.h"
#include "tutti/block_table.h"

using namespace tutti;

namespace {

Key key_of(uint64_t chain, uint64_t position) {
  Key key{};
  std::memcpy(key.data(), &chain, 8);
  std::memcpy(key.data() + 8, &position, 8);
  return key;
}

std::vector<Key> chain_of(uint64_t chain, uint64_t length, uint64_t shared) {
  std::vector<Key> keys;
  for (uint64_t i = 0; i < length; ++i) {
    keys.push_back(key_of(i < shared ? 0 : chain, i));
  }
  return keys;
}

// A key of key_of() says where it belongs.
void check_lineage(const BlockTable& table) {
  const auto slots = table.resident_slots(0, table.slots());
  const auto keys = table.keys_of(slots);
  const auto lineage = table.lineage_of(slots);
  for (size_t i = 0; i < slots.size(); ++i) {
    uint64_t position = 0;
    std::memcpy(&position, keys[i].data() + 8, 8);
    const uint32_t parent = table.record_of(slots[i], RecordState::Resident).parent_slot;
    CHECK(lineage[i].position == position && (position == 0) == (parent == kNoSlot));
    uint64_t above = 0;
    if (parent != kNoSlot) {
      std::memcpy(&above, table.keys_of({&parent, 1})[0].data(), 8);
    }
    CHECK(lineage[i].parent == above);
  }
}

void random_operations(uint64_t seed) {
  constexpr uint64_t kSlots = 200;
  testing::Random random(seed);
  BlockTable table(kSlots, 3);
  std::map<uint32_t, uint32_t> generation;          // slot -> last seen
  std::vector<std::pair<uint32_t, uint32_t>> pins;  // slot, generation
  for (int step = 0; step < 3000; ++step) {
    const uint64_t shared = 3;
    const auto keys = chain_of(1 + random.below(20), 4 + random.below(20), shared);
    std::vector<uint32_t> removed;
    switch (random.below(8)) {
      case 0:
      case 1:
      case 2: {
        const uint64_t free = table.counts().free;
        if (free < keys.size()) {
          for (const uint32_t slot : table.evict(keys.size() - free)) {
            removed.push_back(slot);
          }
          table.release(removed);
          removed.clear();
        }
        std::vector<uint32_t> mine;
        for (const auto& reservation : table.reserve(keys, nullptr, 0, 1, removed)) {
          if (reservation.status == Status::Ok) {
            CHECK(reservation.generation > generation[reservation.slot]);
            generation[reservation.slot] = reservation.generation;
            mine.push_back(reservation.slot);
          }
        }
        for (size_t i = 0; i < mine.size(); ++i) {  // out of order, and some fail
          const uint32_t slot = mine[mine.size() - 1 - i];
          if (random.below(10) == 0) {
            table.abort(slot, removed);
          } else if (table.publish(slot) == Status::Rejected) {
            removed.push_back(slot);
          }
        }
        break;
      }
      case 3:
        table.remove(keys[random.below(keys.size())], 0, removed);
        break;
      case 4:
        removed = table.evict(random.below(10));
        break;
      case 5: {
        uint32_t blocks = 0;
        const uint32_t slot = table.pin_prefix(keys, 1, blocks);
        CHECK((slot == kNoSlot) == (blocks == 0));
        if (blocks != 0) {
          pins.emplace_back(slot, table.record_of(slot, RecordState::Resident).generation);
        }
        break;
      }
      case 6:
        if (!pins.empty()) {
          table.unpin(pins.back().first, pins.back().second);
          pins.pop_back();
        }
        break;
      default: {
        const uint32_t hit = table.find_prefix(keys, 1, true);
        const auto each = table.resolve(keys, 1);
        for (uint32_t i = 0; i < keys.size(); ++i) {  // no holes: the closure
          CHECK((each[i].status == Status::Ok) == (i < hit));
        }
      }
    }
    CHECK(std::set<uint32_t>(removed.begin(), removed.end()).size() == removed.size());
    table.release(removed);
    const TableCounts counts = table.counts();
    CHECK(counts.resident + counts.writing + counts.free + counts.removed == kSlots);
    CHECK(counts.writing == 0 && counts.removed == 0);
    check_lineage(table);
  }
  for (const auto& [slot, gen] : pins) {
    table.unpin(slot, gen);
  }
  CHECK(table.counts().pinned == 0);
  const uint64_t resident = table.counts().resident;
  CHECK(table.evict(kSlots).size() == resident);  // everything is evictable once nothing is pinned
}

void publishes_only_below_a_resident_parent() {
  BlockTable table(8, 1);
  std::vector<uint32_t> removed;
  const auto keys = chain_of(1, 3, 0);
  const auto made = table.reserve(keys, nullptr, 0, 1, removed);
  CHECK(table.publish(made[2].slot) == Status::Ok && table.find_prefix(keys, 1, false) == 0);
  CHECK(table.publish(made[1].slot) == Status::Ok && table.find_prefix(keys, 1, false) == 0);
  CHECK(table.publish(made[0].slot) == Status::Ok && table.find_prefix(keys, 1, false) == 3);
  const Key stranger = key_of(99, 0);
  const auto orphan = table.reserve(chain_of(5, 2, 0), &stranger, 0, 1, removed);
  CHECK(orphan[0].status == Status::Rejected && orphan[1].status == Status::Rejected);
}

void a_failed_parent_takes_its_children() {
  BlockTable table(8, 1);
  std::vector<uint32_t> removed;
  const auto keys = chain_of(1, 4, 0);
  const auto made = table.reserve(keys, nullptr, 0, 1, removed);
  table.publish(made[0].slot);
  table.publish(made[2].slot);         // ready, waits for 1
  table.abort(made[1].slot, removed);  // 1 failed: 2 goes with it, 3 is still being written
  CHECK(removed.size() == 2 && table.state_of(made[3].slot) == SlotState::Doomed);
  CHECK(table.publish(made[3].slot) == Status::Rejected);
  CHECK(table.find_prefix(keys, 1, false) == 1 && table.counts().removed == 3 && table.counts().writing == 0);
}

void evicts_the_least_recently_used_leaf() {
  BlockTable table(8, 1);
  std::vector<uint32_t> removed;
  const auto a = chain_of(1, 3, 0);
  const auto b = chain_of(2, 3, 0);
  for (const auto& keys : {a, b}) {
    for (const auto& reservation : table.reserve(keys, nullptr, 0, 1, removed)) {
      table.publish(reservation.slot);
    }
  }
  table.find_prefix(a, 1, true);  // a is newer now
  CHECK(table.evict(2).size() == 2 && table.find_prefix(b, 1, false) == 1 && table.find_prefix(a, 1, false) == 3);
  CHECK(table.evict(2).size() == 2 && table.find_prefix(b, 1, false) == 0 && table.find_prefix(a, 1, false) == 2);
}

void an_expired_block_takes_its_subtree() {
  BlockTable table(8, 1);
  std::vector<uint32_t> removed;
  const auto keys = chain_of(1, 3, 0);
  for (const auto& reservation : table.reserve(keys, nullptr, 100, 1, removed)) {
    table.publish(reservation.slot);
  }
  CHECK(table.find_prefix(keys, 99, false) == 3 && table.find_prefix(keys, 100, false) == 0);
  table.sweep_expired(8, 100, removed);
  CHECK(removed.size() == 3);
}

}  // namespace

int main() {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    random_operations(seed);
  }
  publishes_only_below_a_resident_parent();
  a_failed_parent_takes_its_children();
  evicts_the_least_recently_used_leaf();
  an_expired_block_takes_its_subtree();
  return 0;
}
