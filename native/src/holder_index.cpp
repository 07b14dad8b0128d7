#include "tutti/holder_index.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <queue>
#include <utility>

namespace tutti {
namespace {

constexpr uint64_t kNoLimit = std::numeric_limits<uint64_t>::max();
constexpr uint32_t kPositionBits = 10;
static_assert(kMostSpanBlocks == 1U << kPositionBits);

uint64_t mix(uint64_t value) noexcept {  // the finalizer of MurmurHash3
  value = (value ^ (value >> 33U)) * 0xFF51AFD7ED558CCDULL;
  value = (value ^ (value >> 33U)) * 0xC4CEB9FE1A85EC53ULL;
  return value ^ (value >> 33U);
}

uint64_t number_hash(uint32_t incarnation, uint64_t number) noexcept { return mix(mix(incarnation + 1ULL) ^ number); }

uint64_t entry_of(uint32_t place, uint32_t position) noexcept { return (place + 1ULL) << kPositionBits | position; }

// What an array of so many hashes takes of the heap.
uint64_t heap_bytes(uint64_t hashes) noexcept {
  return hashes == 0 ? 0 : std::max<uint64_t>(32, (8 * hashes + 23) & ~15ULL);
}

}  // namespace

HolderIndex::HolderIndex(uint64_t most_bytes) : most_bytes_(most_bytes), entries_(8), numbers_(6), limit_(kNoLimit) {}

void HolderIndex::set_alive(uint32_t incarnation, bool alive) {
  if (incarnation >= incarnations_.size()) {
    incarnations_.resize(incarnation + 1ULL);
  }
  incarnations_[incarnation].alive = alive;
}

uint64_t HolderIndex::spans_of(uint32_t incarnation) const noexcept {
  return incarnation < incarnations_.size() ? incarnations_[incarnation].spans : 0;
}

void HolderIndex::put(uint32_t incarnation, uint64_t number, const SpanContent& content) {
  if (const std::optional<uint32_t> there = find(incarnation, number)) {
    if (refresh(at(*there), content)) {
      return;
    }
    drop(*there);
  }
  const uint32_t place = take_place();
  Span& span = at(place);
  span.number = number;
  span.parent = content.parent;
  span.incarnation = incarnation;
  span.start = content.start;
  span.name = take_name(content.name);
  span.blocks = static_cast<uint32_t>(content.hashes.size()) & 0x7FFU;
  span.mark = mark_ & 0x3FFU;
  if (incarnation >= incarnations_.size()) {
    incarnations_.resize(incarnation + 1ULL);
  }
  ++incarnations_[incarnation].spans;
  ++counts_.spans;
  counts_.left_out_blocks += span.blocks;
  numbers_.insert(number_hash(incarnation, number), place + 1ULL);
  keep(place, content.hashes.first(may_keep(content)));
  if (used_bytes() > most_bytes_ && entries_.size() != 0) {
    shed();
  }
}

bool HolderIndex::remove(uint32_t incarnation, uint64_t number) {
  const std::optional<uint32_t> place = find(incarnation, number);
  if (place) {
    drop(*place);
  }
  return place.has_value();
}

void HolderIndex::begin_snapshot() noexcept {
  mark_ = (mark_ + 1) & 0x3FFU;
  if (used_bytes() <= most_bytes_ - most_bytes_ / 4) {
    limit_ = kNoLimit;
  }
}

bool HolderIndex::sweep(uint64_t first, uint64_t count) {
  const uint64_t end = std::min(first + count, used_);
  for (uint64_t place = first; place < end; ++place) {
    if (at(place).blocks != 0 && at(place).mark != mark_) {
      drop(static_cast<uint32_t>(place));
    }
  }
  return end < used_;
}

std::vector<Holder> HolderIndex::holders(const NamespaceName& name, std::span<const uint64_t> hashes) const {
  std::vector<Holder> found;
  const auto named = name_of_.find(name);
  if (named == name_of_.end() || hashes.empty()) {
    return found;
  }
  // How far each incarnation's blocks go without a gap. Where its span ends there, others are looked for, for all that
  // came as far at once.
  std::vector<uint32_t> reach(incarnations_.size(), 0);
  using Waiting = std::pair<uint32_t, uint32_t>;  // reach, incarnation
  std::priority_queue<Waiting, std::vector<Waiting>, std::greater<>> waiting;
  std::vector<uint32_t> here;
  const auto look = [&](uint32_t from) {
    const uint64_t hash = hashes[from];
    entries_.visit(hash_of(named->second, hash), [&](uint64_t entry) {
      const Span& span = at((entry >> kPositionBits) - 1);
      const uint64_t position = entry & (kMostSpanBlocks - 1);
      if (!incarnations_[span.incarnation].alive || reach[span.incarnation] != from || span.name != named->second ||
          span.hashes[position] != hash) {
        return true;
      }
      const auto rest = hashes.subspan(from, std::min<uint64_t>(span.kept - position, hashes.size() - from));
      const auto [differs, _] = std::mismatch(rest.begin(), rest.end(), &span.hashes[position]);
      reach[span.incarnation] = from + static_cast<uint32_t>(differs - rest.begin());
      waiting.emplace(reach[span.incarnation], span.incarnation);
      return true;
    });
  };
  look(0);
  while (!waiting.empty()) {
    const uint32_t from = waiting.top().first;
    here.clear();
    for (; !waiting.empty() && waiting.top().first == from; waiting.pop()) {
      here.push_back(waiting.top().second);
    }
    if (from < hashes.size()) {
      look(from);
    }
    for (const uint32_t incarnation : here) {
      if (reach[incarnation] == from) {
        found.push_back({incarnation, from});
      }
    }
  }
  return found;
}

std::vector<KeptSpan> HolderIndex::spans(uint64_t first, uint64_t count) const {
  std::vector<KeptSpan> found;
  for (uint64_t place = first; place < std::min(first + count, used_); ++place) {
    const Span& span = at(place);
    if (span.blocks != 0) {
      const std::span<const uint64_t> kept(span.hashes.get(), span.kept);
      found.push_back(
          {span.incarnation, span.number, span.blocks, {names_[span.name].name, span.start, span.parent, kept}});
    }
  }
  return found;
}

HolderCounts HolderIndex::counts() const noexcept {
  HolderCounts counts = counts_;
  counts.kept_blocks = entries_.size();
  return counts;
}

uint64_t HolderIndex::memory_bytes() const noexcept {
  return entries_.memory_bytes() + numbers_.memory_bytes() + chunks_.size() * sizeof(Chunk) + hash_bytes_ +
         free_.capacity() * sizeof(uint32_t) + incarnations_.capacity() * sizeof(Incarnation) +
         names_.capacity() * sizeof(Name);
}

std::optional<uint32_t> HolderIndex::find(uint32_t incarnation, uint64_t number) const {
  std::optional<uint32_t> found;
  numbers_.visit(number_hash(incarnation, number), [&](uint64_t value) {
    const auto place = static_cast<uint32_t>(value - 1);
    if (at(place).incarnation == incarnation && at(place).number == number) {
      found = place;
    }
    return !found;
  });
  return found;
}

bool HolderIndex::held_by_any(uint32_t name, uint64_t hash) const {
  bool held = false;
  entries_.visit(hash_of(name, hash), [&](uint64_t entry) {
    const Span& span = at((entry >> kPositionBits) - 1);
    held = span.name == name && span.hashes[entry & (kMostSpanBlocks - 1)] == hash;
    return !held;
  });
  return held;
}

uint64_t HolderIndex::hash_of(uint32_t name, uint64_t hash) const noexcept { return mix(hash ^ names_[name].salt); }

uint64_t HolderIndex::used_bytes() const noexcept { return counts_.spans * kSpanBytes + entries_.size() * kBlockBytes; }

uint32_t HolderIndex::may_keep(const SpanContent& content) const noexcept {
  return content.start >= limit_
             ? 0
             : static_cast<uint32_t>(std::min<uint64_t>(content.hashes.size(), limit_ - content.start));
}

uint32_t HolderIndex::take_place() {
  if (!free_.empty()) {
    const uint32_t place = free_.back();
    free_.pop_back();
    return place;
  }
  if (used_ == chunks_.size() * kChunk) {
    chunks_.push_back(std::make_unique<Chunk>());
  }
  return static_cast<uint32_t>(used_++);
}

uint32_t HolderIndex::take_name(const NamespaceName& name) {
  auto named = name_of_.find(name);
  if (named == name_of_.end()) {
    uint32_t own = 0;
    if (free_names_.empty()) {
      own = static_cast<uint32_t>(names_.size());
      names_.emplace_back();
    } else {
      own = free_names_.back();
      free_names_.pop_back();
    }
    std::array<uint64_t, 2> words{};
    std::memcpy(words.data(), name.data(), name.size());
    names_[own] = {name, 0, mix(mix(words[0]) ^ words[1])};
    named = name_of_.emplace(name, own).first;
  }
  ++names_[named->second].spans;
  return named->second;
}

// Whether the span is this one already, as far as it is kept, and no more of it can be.
bool HolderIndex::refresh(Span& span, const SpanContent& content) {
  if (span.blocks != content.hashes.size() || span.start != content.start || span.parent != content.parent ||
      names_[span.name].name != content.name ||
      !std::equal(span.hashes.get(), span.hashes.get() + span.kept, content.hashes.begin())) {
    return false;
  }
  span.mark = mark_ & 0x3FFU;
  const uint32_t wanted = may_keep(content);
  return wanted <= span.kept || used_bytes() + (wanted - span.kept) * kBlockBytes > most_bytes_;
}

// Of a span of which nothing is kept yet.
void HolderIndex::keep(uint32_t place, std::span<const uint64_t> hashes) {
  if (hashes.empty()) {
    return;
  }
  Span& span = at(place);
  span.hashes = std::make_unique_for_overwrite<uint64_t[]>(hashes.size());
  std::copy(hashes.begin(), hashes.end(), span.hashes.get());
  hash_bytes_ += heap_bytes(hashes.size());
  for (uint32_t position = 0; position < hashes.size(); ++position) {
    counts_.distinct_blocks += held_by_any(span.name, hashes[position]) ? 0 : 1;
    entries_.insert(hash_of(span.name, hashes[position]), entry_of(place, position));
  }
  span.kept = static_cast<uint32_t>(hashes.size()) & 0x7FFU;
  counts_.left_out_blocks -= span.kept;
}

// Leaves `kept` of its blocks.
void HolderIndex::cut(uint32_t place, uint32_t kept) {
  Span& span = at(place);
  for (uint32_t position = kept; position < span.kept; ++position) {
    entries_.erase(hash_of(span.name, span.hashes[position]), entry_of(place, position));
    counts_.distinct_blocks -= held_by_any(span.name, span.hashes[position]) ? 0 : 1;
  }
  counts_.left_out_blocks += span.kept - kept;
  hash_bytes_ -= heap_bytes(span.kept) - heap_bytes(kept);
  std::unique_ptr<uint64_t[]> left;
  if (kept != 0) {
    left = std::make_unique_for_overwrite<uint64_t[]>(kept);
    std::copy_n(span.hashes.get(), kept, left.get());
  }
  span.hashes = std::move(left);
  span.kept = kept & 0x7FFU;
}

void HolderIndex::drop(uint32_t place) {
  cut(place, 0);
  Span& span = at(place);
  numbers_.erase(number_hash(span.incarnation, span.number), place + 1ULL);
  --incarnations_[span.incarnation].spans;
  --counts_.spans;
  counts_.left_out_blocks -= span.blocks;
  if (--names_[span.name].spans == 0) {
    name_of_.erase(names_[span.name].name);
    free_names_.push_back(span.name);
  }
  span = Span();
  free_.push_back(place);
}

// Leaves the deepest blocks out until a sixteenth is free, so that the next time is far.
void HolderIndex::shed() {
  uint64_t excess = used_bytes() - (most_bytes_ - most_bytes_ / 16);
  excess = std::min((excess + kBlockBytes - 1) / kBlockBytes, entries_.size());
  uint64_t deepest = 0;
  for (uint64_t place = 0; place < used_; ++place) {
    deepest = std::max(deepest, end_of(at(place)));
  }
  // How many blocks are at each depth, or in each run of `width` depths.
  const uint64_t width = deepest / 65536 + 1;
  std::vector<uint64_t> some(deepest / width + 2);
  std::vector<int64_t> whole(deepest / width + 2);  // where spans begin to have all of a run, and where they end to
  for (uint64_t place = 0; place < used_; ++place) {
    const Span& span = at(place);
    if (span.kept == 0) {
      continue;
    }
    const uint64_t first = span.start / width;
    const uint64_t last = (end_of(span) - 1) / width;
    if (first == last) {
      some[first] += span.kept;
      continue;
    }
    some[first] += (first + 1) * width - span.start;
    some[last] += end_of(span) - last * width;
    ++whole[first + 1];
    --whole[last];
  }
  int64_t spans = 0;
  for (uint64_t run = 0; run < some.size(); ++run) {
    spans += whole[run];
    some[run] += static_cast<uint64_t>(spans) * width;
  }
  uint64_t run = some.size() - 1;
  for (; excess > some[run]; --run) {
    excess -= some[run];
  }
  // All blocks behind this run go, and `excess` of those in it.
  limit_ = (run + (excess < some[run] ? 1 : 0)) * width;
  const uint64_t begin = run * width;
  for (uint64_t place = 0; place < used_; ++place) {
    const Span& span = at(place);
    uint64_t end = std::min(end_of(span), begin + width);
    if (const uint64_t from = std::max<uint64_t>(begin, span.start); end > from) {
      const uint64_t gone = std::min(excess, end - from);
      excess -= gone;
      end -= gone;
    }
    if (end < end_of(span)) {
      cut(static_cast<uint32_t>(place), static_cast<uint32_t>(end - std::min<uint64_t>(end, span.start)));
    }
  }
}

}  // namespace tutti
