// Which nodes hold which blocks: spans by the incarnation (a node's epoch) and number that name them, and each of their
// blocks by its short hash. See docs/directory.md.
//
// Invariants
//  - an entry stands for one block of one span, and goes with that span: where spans overlap, a block is held as long
//    as one of them has it.
//  - what is kept of a span is its beginning: the blocks deepest in their chains are left out first. So answers may be
//    shorter than the truth, and are never wrong.
//  - kept blocks and spans, as counted by kBlockBytes and kSpanBytes, take at most `most_bytes`; spans themselves are
//    never left out.
// Not thread-safe.
// Memory: about 18 bytes per block and 70 per span.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "tutti/tag_table.h"

namespace tutti {

inline constexpr uint32_t kMostSpanBlocks = 1024;
using NamespaceName = std::array<uint8_t, 16>;

// As recorded. `hashes`: of the blocks at positions `start`, `start + 1`, ... of a chain; 1 to kMostSpanBlocks.
struct SpanContent {
  NamespaceName name{};
  uint32_t start = 0;
  uint64_t parent = 0;
  std::span<const uint64_t> hashes;
};

// A span and what is kept of it. `blocks`: how many it has.
struct KeptSpan {
  uint32_t incarnation = 0;
  uint64_t number = 0;
  uint32_t blocks = 0;
  SpanContent kept;
};

struct Holder {
  uint32_t incarnation = 0;
  uint32_t blocks = 0;
};

struct HolderCounts {
  uint64_t spans = 0;
  uint64_t kept_blocks = 0;      // of all spans
  uint64_t distinct_blocks = 0;  // of the kept
  uint64_t left_out_blocks = 0;
};

class HolderIndex {
 public:
  static constexpr uint64_t kBlockBytes = 20;  // a hash, and an entry where the table is least full
  static constexpr uint64_t kSpanBytes = 80;

  explicit HolderIndex(uint64_t most_bytes);
  HolderIndex(const HolderIndex&) = delete;
  HolderIndex& operator=(const HolderIndex&) = delete;

  // Incarnations are small numbers of the caller's, who may use one again when it has no span.
  void set_alive(uint32_t incarnation, bool alive);
  [[nodiscard]] uint64_t spans_of(uint32_t incarnation) const noexcept;

  // The span of this name, in the place of one that may be there.
  void put(uint32_t incarnation, uint64_t number, const SpanContent& content);
  // Whether it was there.
  bool remove(uint32_t incarnation, uint64_t number);

  // A snapshot: between begin_snapshot and sweeps over all places, spans that aren't put are removed by the sweeps.
  // Where there is room again, blocks that were left out come back.
  void begin_snapshot() noexcept;
  // Of the places from `first` on, at most `count`. Whether there are more behind them.
  bool sweep(uint64_t first, uint64_t count);

  // Incarnations that are alive and hold hashes[0], and how many from there on without a gap.
  [[nodiscard]] std::vector<Holder> holders(const NamespaceName& name, std::span<const uint64_t> hashes) const;

  // Spans of the places from `first` on, at most `count` places; they are valid until the next change.
  [[nodiscard]] std::vector<KeptSpan> spans(uint64_t first, uint64_t count) const;
  [[nodiscard]] uint64_t places() const noexcept { return used_; }

  [[nodiscard]] HolderCounts counts() const noexcept;
  // What the bound is for.
  [[nodiscard]] uint64_t used_bytes() const noexcept;
  // What is allocated.
  [[nodiscard]] uint64_t memory_bytes() const noexcept;

 private:
  struct Span {
    uint64_t number = 0;
    uint64_t parent = 0;
    std::unique_ptr<uint64_t[]> hashes;
    uint32_t incarnation = 0;
    uint32_t start = 0;
    uint32_t name = 0;
    uint32_t blocks : 11 = 0;  // 0: no span is here
    uint32_t kept : 11 = 0;
    uint32_t mark : 10 = 0;  // of the snapshot that had it
  };
  static_assert(sizeof(Span) == 40);
  struct Name {
    NamespaceName name{};
    uint64_t spans = 0;
    uint64_t salt = 0;
  };
  struct Incarnation {
    uint64_t spans = 0;
    bool alive = false;
  };
  static constexpr uint64_t kChunk = 4096;
  using Chunk = std::array<Span, kChunk>;

  // Places of spans are numbered from 0; in tables by one more.
  [[nodiscard]] Span& at(uint64_t place) const noexcept { return (*chunks_[place / kChunk])[place % kChunk]; }
  static uint64_t end_of(const Span& span) noexcept { return span.start + uint64_t{span.kept}; }
  [[nodiscard]] std::optional<uint32_t> find(uint32_t incarnation, uint64_t number) const;
  [[nodiscard]] bool held_by_any(uint32_t name, uint64_t hash) const;
  [[nodiscard]] uint64_t hash_of(uint32_t name, uint64_t hash) const noexcept;
  [[nodiscard]] uint32_t may_keep(const SpanContent& content) const noexcept;
  uint32_t take_place();
  uint32_t take_name(const NamespaceName& name);
  bool refresh(Span& span, const SpanContent& content);
  void keep(uint32_t place, std::span<const uint64_t> hashes);
  void cut(uint32_t place, uint32_t kept);
  void drop(uint32_t place);
  void shed();

  uint64_t most_bytes_;
  TagTable entries_;  // place + 1, and position in the span below it
  TagTable numbers_;  // place + 1
  std::vector<std::unique_ptr<Chunk>> chunks_;
  std::vector<uint32_t> free_;
  uint64_t used_ = 0;  // places that were ever in use
  std::vector<Incarnation> incarnations_;
  std::map<NamespaceName, uint32_t> name_of_;
  std::vector<Name> names_;
  std::vector<uint32_t> free_names_;
  uint64_t limit_;  // blocks at this depth, and deeper ones, are left out
  uint32_t mark_ = 0;
  HolderCounts counts_;
  uint64_t hash_bytes_ = 0;
};

}  // namespace tutti
