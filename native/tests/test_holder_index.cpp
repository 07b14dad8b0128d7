// The index against a plain model, by random operations, without a bound and with one; what is left out is the deepest.
#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "check.h"
#include "tutti/holder_index.h"

using namespace tutti;
using tutti::testing::Random;

namespace {

constexpr uint64_t kPlenty = uint64_t{1} << 40U;
constexpr uint32_t kIncarnations = 5;

struct Recorded {
  NamespaceName name;
  uint32_t start;
  std::vector<uint64_t> hashes;
};
using Model = std::map<std::pair<uint32_t, uint64_t>, Recorded>;

NamespaceName named(uint8_t name) { return {name}; }

void put(HolderIndex& index, uint32_t incarnation, uint64_t number, uint8_t name, uint32_t start,
         const std::vector<uint64_t>& hashes) {
  index.put(incarnation, number, {named(name), start, 0, hashes});
}

std::map<uint32_t, uint32_t> held(const HolderIndex& index, uint8_t name, const std::vector<uint64_t>& hashes) {
  std::map<uint32_t, uint32_t> found;
  for (const Holder& one : index.holders(named(name), hashes)) {
    CHECK(found.emplace(one.incarnation, one.blocks).second);
  }
  return found;
}

std::map<uint32_t, uint32_t> expected(const Model& model, uint8_t name, const std::vector<uint64_t>& hashes,
                                      uint32_t alive) {
  std::map<uint32_t, std::set<uint64_t>> blocks;
  for (const auto& [key, recorded] : model) {
    if (recorded.name == named(name) && (alive >> key.first & 1U) != 0) {
      blocks[key.first].insert(recorded.hashes.begin(), recorded.hashes.end());
    }
  }
  std::map<uint32_t, uint32_t> found;
  for (const auto& [incarnation, has] : blocks) {
    uint32_t length = 0;
    while (length < hashes.size() && has.contains(hashes[length])) {
      ++length;
    }
    if (length != 0) {
      found[incarnation] = length;
    }
  }
  return found;
}

// Of a few chains, of which pairs have their first 8 blocks in common; sometimes with a block twice.
std::vector<uint64_t> some_of_a_chain(Random& random, uint32_t& start) {
  const uint64_t chain = random.below(6);
  start = static_cast<uint32_t>(random.below(24));
  std::vector<uint64_t> hashes;
  for (uint64_t i = 0, length = 1 + random.below(16); i < length; ++i) {
    const uint64_t depth = start + i;
    hashes.push_back(((depth < 8 ? chain / 2 : chain) << 8U) + depth + 1);
  }
  if (random.below(10) == 0) {
    hashes.push_back(hashes.front());
  }
  return hashes;
}

void check_counts(const HolderIndex& index, const Model& model, bool all_kept) {
  uint64_t blocks = 0;
  std::set<std::pair<NamespaceName, uint64_t>> distinct;
  for (const auto& [key, recorded] : model) {
    blocks += recorded.hashes.size();
    for (const uint64_t hash : recorded.hashes) {
      distinct.emplace(recorded.name, hash);
    }
  }
  const HolderCounts counts = index.counts();
  CHECK(counts.spans == model.size() && counts.kept_blocks + counts.left_out_blocks == blocks);
  CHECK(!all_kept || (counts.left_out_blocks == 0 && counts.distinct_blocks == distinct.size()));
}

void random_operations(uint64_t seed, uint64_t most_bytes) {
  Random random(seed);
  HolderIndex index(most_bytes);
  Model model;
  uint32_t alive = 0;
  for (int step = 0; step < 4000; ++step) {
    const auto incarnation = static_cast<uint32_t>(random.below(kIncarnations));
    const uint64_t number = random.below(12);
    const auto name = static_cast<uint8_t>(random.below(2));
    uint32_t start = 0;
    switch (random.below(8)) {
      case 0: {
        const bool lives = random.below(4) != 0;
        alive = (alive & ~(1U << incarnation)) | static_cast<uint32_t>(lives) << incarnation;
        index.set_alive(incarnation, lives);
        break;
      }
      case 1:
      case 2:
        CHECK(index.remove(incarnation, number) == (model.erase({incarnation, number}) != 0));
        break;
      case 3:
        if (random.below(8) == 0) {  // a snapshot: half stays, and is put again
          index.begin_snapshot();
          for (auto at = model.begin(); at != model.end();) {
            if (random.below(2) == 0) {
              at = model.erase(at);
              continue;
            }
            index.put(at->first.first, at->first.second, {at->second.name, at->second.start, 0, at->second.hashes});
            ++at;
          }
          for (uint64_t first = 0; index.sweep(first, 5); first += 5) {
          }
        }
        break;
      default: {
        const std::vector<uint64_t> hashes = some_of_a_chain(random, start);
        put(index, incarnation, number, name, start, hashes);
        model[{incarnation, number}] = {named(name), start, hashes};
      }
    }
    const std::vector<uint64_t> prompt = some_of_a_chain(random, start);
    const auto answer = held(index, name, prompt);
    const auto right = expected(model, name, prompt, alive);
    if (most_bytes == kPlenty) {
      CHECK(answer == right);
    } else {
      CHECK(index.used_bytes() <= most_bytes);
      for (const auto& [holder, length] : answer) {
        CHECK(right.contains(holder) && length <= right.at(holder));
      }
    }
    if (step % 32 == 0) {
      check_counts(index, model, most_bytes == kPlenty);
    }
  }
  for (const auto& [key, recorded] : model) {
    CHECK(index.remove(key.first, key.second));
  }
  CHECK(index.counts().spans == 0 && index.counts().kept_blocks == 0 && index.counts().distinct_blocks == 0 &&
        index.counts().left_out_blocks == 0);
}

std::vector<uint64_t> chain_of(uint64_t chain, uint64_t first, uint64_t count) {
  std::vector<uint64_t> hashes;
  for (uint64_t i = 0; i < count; ++i) {
    hashes.push_back((chain << 32U) + first + i + 1);
  }
  return hashes;
}

}  // namespace

int main() {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    random_operations(seed, kPlenty);
    random_operations(seed, 8192);
  }

  // The deepest are left out first, in chains that shallow runs and deep ones are of alike.
  constexpr uint64_t kBound = 20 * HolderIndex::kSpanBytes + 5000 * HolderIndex::kBlockBytes;
  HolderIndex index(kBound);
  index.set_alive(0, true);
  for (uint64_t chain = 0; chain < 10; ++chain) {
    put(index, 0, 2 * chain, 0, 0, chain_of(chain, 0, 1000));
    put(index, 0, 2 * chain + 1, 0, 1000, chain_of(chain, 1000, 1000));
  }
  CHECK(index.counts().left_out_blocks >= 15000 && index.counts().kept_blocks > 4000);
  uint32_t shortest = 2000, longest = 0;
  for (uint64_t chain = 0; chain < 10; ++chain) {
    const auto found = held(index, 0, chain_of(chain, 0, 2000));
    shortest = std::min(shortest, found.at(0));
    longest = std::max(longest, found.at(0));
  }
  CHECK(longest - shortest <= 1 && shortest > 400);
  // What was cut goes without taking anything of another span along, and comes back with a snapshot where there is
  // room.
  put(index, 1, 1, 0, 0, chain_of(0, 0, 100));
  index.set_alive(1, true);
  for (uint64_t number = 0; number < 16; ++number) {
    CHECK(index.remove(0, number));
  }
  CHECK(held(index, 0, chain_of(0, 0, 2000)) == (std::map<uint32_t, uint32_t>{{1, 100}}));
  index.begin_snapshot();
  put(index, 0, 16, 0, 0, chain_of(8, 0, 1000));
  put(index, 0, 17, 0, 1000, chain_of(8, 1000, 1000));
  CHECK(!index.sweep(0, 1000));
  CHECK(held(index, 0, chain_of(8, 0, 2000)) == (std::map<uint32_t, uint32_t>{{0, 2000}}) && index.counts().spans == 2);

  // A bound below the spans themselves leaves out every block; one chain deeper than any table of depths is cut too.
  HolderIndex tiny(100);
  put(tiny, 0, 1, 0, 0, chain_of(0, 0, 10));
  put(tiny, 0, 2, 0, 0, chain_of(1, 0, 10));
  CHECK(tiny.counts().spans == 2 && tiny.counts().kept_blocks == 0 && tiny.counts().left_out_blocks == 20);
  HolderIndex deep(2 * HolderIndex::kSpanBytes + 1000 * HolderIndex::kBlockBytes);
  deep.set_alive(0, true);
  put(deep, 0, 1, 0, 0, chain_of(0, 0, 900));
  put(deep, 0, 2, 0, 2000000000, chain_of(0, 900, 900));
  CHECK(held(deep, 0, chain_of(0, 0, 1800)).at(0) >= 900);

  // Memory: what the header says.
  HolderIndex large(kPlenty);
  constexpr uint64_t kSpans = 20000;
  for (uint64_t number = 0; number < kSpans; ++number) {
    put(large, 0, number, 0, 0, chain_of(number, 0, 100));
  }
  CHECK(large.memory_bytes() <= kSpans * 100 * HolderIndex::kBlockBytes + kSpans * HolderIndex::kSpanBytes);
  return 0;
}
