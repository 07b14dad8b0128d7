// The table against a multimap, by random operations, with hashes of one tag, of one home and at the shard's end.
#include <algorithm>
#include <map>
#include <vector>

#include "check.h"
#include "tutti/tag_table.h"

using namespace tutti;
using tutti::testing::Random;

namespace {

std::vector<uint64_t> found(const TagTable& table, uint64_t hash) {
  std::vector<uint64_t> values;
  table.visit(hash, [&](uint64_t value) {
    values.push_back(value);
    return true;
  });
  std::sort(values.begin(), values.end());
  return values;
}

uint64_t hash_of(Random& random) {
  switch (random.below(4)) {
    case 0:
      return random.below(4) << 32U;  // neighbours in the first shard
    case 1:
      return ~uint64_t{0} << 32U ^ random.below(4) << 32U;  // behind the last homes of the last one
    default:
      return random.below(64) << 54U | random.below(64) << 48U;
  }
}

}  // namespace

int main() {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    Random random(seed);
    TagTable table(seed % 2 == 0 ? 0 : 6);
    std::multimap<uint64_t, uint64_t> model;  // by what the table keeps of a hash
    for (int step = 0; step < 10000; ++step) {
      const uint64_t hash = hash_of(random);
      const auto [begin, end] = model.equal_range(hash);
      const bool growing = step / 2000 % 2 == 0;
      if (begin != end && random.below(8) < (growing ? 2U : 6U)) {
        table.erase(hash, begin->second);
        model.erase(begin);
      } else if (growing || random.below(4) == 0) {
        const uint64_t value = 1 + random.below(1U << 20U);
        table.insert(hash, value);
        model.emplace(hash, value);
      }
      CHECK(table.size() == model.size());
      const uint64_t asked = hash_of(random);
      std::vector<uint64_t> expected;
      for (auto [at, last] = model.equal_range(asked); at != last; ++at) {
        expected.push_back(at->second);
      }
      std::sort(expected.begin(), expected.end());
      const std::vector<uint64_t> values = found(table, asked);
      if (seed % 2 != 0) {
        CHECK(values == expected);
      } else {  // one shard: hashes of several shards have one tag here
        CHECK(std::includes(values.begin(), values.end(), expected.begin(), expected.end()));
      }
    }
    while (!model.empty()) {
      table.erase(model.begin()->first, model.begin()->second);
      model.erase(model.begin());
    }
    CHECK(table.size() == 0 && table.memory_bytes() < 64 * 256);
  }
  // Memory follows what is there, and visits end when told to.
  TagTable table(4);
  Random random(7);
  std::vector<uint64_t> hashes(200000);
  for (uint64_t& hash : hashes) {
    hash = random.next();
    table.insert(hash, 1);
  }
  CHECK(table.memory_bytes() < hashes.size() * 11);
  for (size_t i = 1000; i < hashes.size(); ++i) {
    table.erase(hashes[i], 1);
    if (i % 20000 == 0) {
      CHECK(table.memory_bytes() < (hashes.size() - i) * 12 + 4096);
    }
  }
  table.insert(hashes[0], 2);
  int visits = 0;
  table.visit(hashes[0], [&](uint64_t) { return ++visits < 1; });
  CHECK(visits == 1);
  return 0;
}
