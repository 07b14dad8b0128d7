#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <optional>

#include "arrays.h"
#include "tutti/block_table.h"
#include "tutti/plan.h"

namespace tutti::bindings {
namespace {

// Reservations as four parallel arrays: status, slot, generation, rot.
nb::tuple unzip(const std::vector<Reservation>& reservations) {
  const size_t n = reservations.size();
  std::vector<uint8_t> statuses(n), rots(n);
  std::vector<uint32_t> slots(n), generations(n);
  for (size_t i = 0; i < n; ++i) {
    statuses[i] = static_cast<uint8_t>(reservations[i].status);
    slots[i] = reservations[i].slot;
    generations[i] = reservations[i].generation;
    rots[i] = reservations[i].rot;
  }
  return nb::make_tuple(to_numpy(std::move(statuses)), to_numpy(std::move(slots)), to_numpy(std::move(generations)),
                        to_numpy(std::move(rots)));
}

nb::tuple reserve(BlockTable& table, const KeysIn& keys, const std::optional<KeysIn>& parent, uint32_t expiry,
                  uint32_t now) {
  std::vector<uint32_t> removed;
  std::vector<Reservation> reservations;
  {
    const nb::gil_scoped_release release;
    const Key* parent_key = parent ? to_keys(*parent).data() : nullptr;
    reservations = table.reserve(to_keys(keys), parent_key, expiry, now, removed);
  }
  return nb::make_tuple(unzip(reservations), to_numpy(std::move(removed)));
}

Out<uint8_t> publish(BlockTable& table, const In<uint32_t>& slots) {
  std::vector<uint8_t> statuses;
  {
    const nb::gil_scoped_release release;
    for (const uint32_t slot : to_span(slots)) {
      statuses.push_back(static_cast<uint8_t>(table.publish(slot)));
    }
  }
  return to_numpy(std::move(statuses));
}

nb::dict scan(SlotTable& slots, BlockTable& table) {
  ScanCounts counts;
  uint64_t duplicates = 0;
  std::vector<uint32_t> bad;
  {
    const nb::gil_scoped_release release;
    counts = slots.scan([&](const SlotRecord& record) {
      if (!table.load(record)) {
        ++duplicates;
        bad.push_back(record.slot);
      }
    });
  }
  nb::dict result;
  result["read"] = counts.read;
  result["never_used"] = counts.never_used;
  result["free"] = counts.free;
  result["resident"] = counts.resident;
  result["bad_check"] = counts.bad_check;
  result["wrong_slot"] = counts.wrong_slot;
  result["foreign_pool"] = counts.foreign_pool;
  result["unreadable"] = counts.unreadable;
  result["duplicate_key"] = duplicates;
  result["duplicate_slots"] = to_numpy(std::move(bad));
  return result;
}

// Checksums that one rank's write plan has computed. Status per position.
Out<uint8_t> write_sums(const SlotTable& slots, const Plan& plan, const In<uint32_t>& positions, uint32_t first_sum) {
  std::vector<uint8_t> statuses;
  {
    const nb::gil_scoped_release release;
    for (const uint32_t position : to_span(positions)) {
      const std::span<const uint64_t> sums(plan.sums.data() + static_cast<size_t>(position) * plan.objects,
                                           plan.objects);
      statuses.push_back(static_cast<uint8_t>(slots.write_sums(plan.slots[position], first_sum, sums)));
    }
  }
  return to_numpy(std::move(statuses));
}

// Records of blocks whose bytes and checksums are durable. Status per slot.
Out<uint8_t> commit(const SlotTable& slots, const BlockTable& table, const In<uint32_t>& which, uint32_t created) {
  std::vector<uint8_t> statuses;
  {
    const nb::gil_scoped_release release;
    for (const uint32_t slot : to_span(which)) {
      SlotRecord record = table.record_of(slot, RecordState::Resident);
      record.created = created;
      // Looked at after the snapshot: a block whose parent went has lost its place in the tree, and must not come
      // back as a root.
      const bool alive = table.state_of(slot) == SlotState::Writing;
      statuses.push_back(static_cast<uint8_t>(alive ? slots.write_record(record) : Status::Rejected));
    }
  }
  return to_numpy(std::move(statuses));
}

uint8_t write_records(SlotTable& slots, BlockTable& table, const In<uint32_t>& which, bool resident) {
  const nb::gil_scoped_release release;
  for (const uint32_t slot : to_span(which)) {
    const SlotRecord record = table.record_of(slot, resident ? RecordState::Resident : RecordState::Free);
    if (const Status status = slots.write_record(record); status != Status::Ok) {
      return static_cast<uint8_t>(status);
    }
  }
  return static_cast<uint8_t>(Status::Ok);
}

uint8_t save_recency(const SlotTable& slots, const BlockTable& table) {
  const nb::gil_scoped_release release;
  return static_cast<uint8_t>(slots.update_last_use([&](uint32_t slot, uint32_t generation) {
    const SlotRecord now = table.record_of(slot, RecordState::Resident);
    return now.generation == generation && table.state_of(slot) == SlotState::Resident ? now.last_use : 0U;
  }));
}

nb::dict records(const BlockTable& table, const SlotTable& slots, const In<uint32_t>& which) {
  std::vector<Key> keys;
  std::vector<uint32_t> parents, generations, created, used, expiry;
  std::vector<uint8_t> rots;
  {
    const nb::gil_scoped_release release;
    for (const uint32_t slot : to_span(which)) {
      const SlotRecord record = table.record_of(slot, RecordState::Resident);
      SlotRecord stored;
      keys.push_back(record.key);
      parents.push_back(record.parent_slot);
      generations.push_back(record.generation);
      rots.push_back(record.rot);
      used.push_back(record.last_use);
      expiry.push_back(record.expiry);
      created.push_back(slots.read_record(slot, stored) == Status::Ok ? stored.created : 0);
    }
  }
  nb::dict result;
  result["keys"] = to_numpy_keys(std::move(keys));
  result["parent_slots"] = to_numpy(std::move(parents));
  result["generations"] = to_numpy(std::move(generations));
  result["rots"] = to_numpy(std::move(rots));
  result["created"] = to_numpy(std::move(created));
  result["last_use"] = to_numpy(std::move(used));
  result["expiry"] = to_numpy(std::move(expiry));
  return result;
}

template <typename Remove>
Out<uint32_t> removed_by(Remove remove) {
  std::vector<uint32_t> removed;
  {
    const nb::gil_scoped_release release;
    remove(removed);
  }
  return to_numpy(std::move(removed));
}

}  // namespace

void bind_index(nb::module_& module) {
  nb::class_<SlotTable>(module, "SlotTable",
                        "Durable index: a record and the object checksums per slot (docs/format.md).")
      .def(nb::init<int, uint64_t, uint64_t, uint64_t, uint32_t, uint64_t>(), nb::arg("fd"), nb::arg("records_offset"),
           nb::arg("sums_offset"), nb::arg("slots"), nb::arg("sums_per_slot"), nb::arg("pool"))
      .def("scan", &scan, nb::arg("table"), "Loads every valid record into `table`; returns counts by kind of record.")
      .def("write_sums", &write_sums, nb::arg("plan"), nb::arg("positions"), nb::arg("first_sum"),
           "Writes the checksums of blocks of a finished write plan; one status per position.")
      .def("commit", &commit, nb::arg("table"), nb::arg("slots"), nb::arg("created"),
           "Writes the records of blocks whose bytes and checksums are on the device; one status per slot.")
      .def("write", &write_records, nb::arg("table"), nb::arg("slots"), nb::arg("resident"),
           "Rewrites records, as resident or as free; the first status that isn't OK.")
      .def("save_recency", &save_recency, nb::arg("table"),
           "Brings the records' last use up to date; the first status that isn't OK.");

  nb::class_<BlockTable>(module, "BlockTable", "Index in memory: keys, slots, prefix trees, eviction. Thread-safe.")
      .def(nb::init<uint64_t, uint32_t>(), nb::arg("slots"), nb::arg("devices"))
      .def(
          "find_prefix",
          [](BlockTable& table, const KeysIn& keys, uint32_t now, bool touch) {
            const nb::gil_scoped_release release;
            return table.find_prefix(to_keys(keys), now, touch);
          },
          nb::arg("keys"), nb::arg("now"), nb::arg("touch"))
      .def(
          "resolve",
          [](BlockTable& table, const KeysIn& keys, uint32_t now) {
            std::vector<Reservation> reservations;
            {
              const nb::gil_scoped_release release;
              reservations = table.resolve(to_keys(keys), now);
            }
            return unzip(reservations);
          },
          nb::arg("keys"), nb::arg("now"), "(status, slot, generation, rot), an array each.")
      .def("reserve", &reserve, nb::arg("keys"), nb::arg("parent").none(), nb::arg("expiry"), nb::arg("now"),
           "((status, slot, generation, rot), removed slots).")
      .def("publish", &publish, nb::arg("slots"))
      .def(
          "abort",
          [](BlockTable& table, const In<uint32_t>& slots) {
            return removed_by([&](auto& removed) {
              for (const uint32_t slot : to_span(slots)) {
                table.abort(slot, removed);
              }
            });
          },
          nb::arg("slots"))
      .def(
          "evict",
          [](BlockTable& table, uint64_t count) {
            return removed_by([&](auto& removed) { removed = table.evict(count); });
          },
          nb::arg("count"))
      .def(
          "remove",
          [](BlockTable& table, const KeysIn& keys, const In<uint32_t>& generations) {
            return removed_by([&](auto& removed) {
              const auto all = to_keys(keys);
              for (size_t i = 0; i < all.size(); ++i) {
                table.remove(all[i], to_span(generations)[i], removed);
              }
            });
          },
          nb::arg("keys"), nb::arg("generations"))
      .def(
          "sweep_expired",
          [](BlockTable& table, uint64_t count, uint32_t now) {
            return removed_by([&](auto& removed) { table.sweep_expired(count, now, removed); });
          },
          nb::arg("count"), nb::arg("now"))
      .def("clear", [](BlockTable& table) { return removed_by([&](auto& removed) { table.clear(removed); }); })
      .def(
          "release",
          [](BlockTable& table, const In<uint32_t>& slots) {
            const nb::gil_scoped_release release;
            table.release(to_span(slots));
          },
          nb::arg("slots"))
      .def(
          "keys",
          [](const BlockTable& table, const In<uint32_t>& slots) {
            return to_numpy_keys(table.keys_of(to_span(slots)));
          },
          nb::arg("slots"), "Keys of slots in use, or removed and not yet given out again.")
      .def(
          "lineage",
          [](const BlockTable& table, const In<uint32_t>& slots) {
            std::vector<uint64_t> parents;
            std::vector<uint32_t> positions;
            for (const Lineage& one : table.lineage_of(to_span(slots))) {
              parents.push_back(one.parent);
              positions.push_back(one.position);
            }
            return std::make_tuple(to_numpy(std::move(parents)), to_numpy(std::move(positions)));
          },
          nb::arg("slots"),
          "Of slots in use: the first 8 bytes of the parent's key (0 at a root), and the position in its chain.")
      .def(
          "pin_prefix",
          [](BlockTable& table, const KeysIn& keys, uint32_t now) {
            uint32_t blocks = 0;
            const uint32_t slot = table.pin_prefix(to_keys(keys), now, blocks);
            const uint32_t generation = slot == kNoSlot ? 0 : table.record_of(slot, RecordState::Free).generation;
            return std::make_tuple(slot, generation, blocks);
          },
          nb::arg("keys"), nb::arg("now"), "(slot, generation, blocks); slot 2**32-1 = nothing resident.")
      .def("pin", &BlockTable::pin, nb::arg("slot"))
      .def(
          "unpin",
          [](BlockTable& table, uint32_t slot, uint32_t generation) {
            return table.unpin(slot, generation) == Status::Ok;
          },
          nb::arg("slot"), nb::arg("generation"))
      .def(
          "finish_load",
          [](BlockTable& table, uint32_t now) {
            uint64_t orphans = 0;
            uint64_t expired = 0;
            std::vector<uint32_t> dropped;
            {
              const nb::gil_scoped_release release;
              dropped = table.finish_load(now, orphans, expired);
            }
            return nb::make_tuple(to_numpy(std::move(dropped)), orphans, expired);
          },
          nb::arg("now"), "(dropped slots, orphans, expired).")
      .def(
          "resident_slots",
          [](const BlockTable& table, uint32_t first, uint64_t limit) {
            return to_numpy(table.resident_slots(first, limit));
          },
          nb::arg("first"), nb::arg("limit"))
      .def("records", &records, nb::arg("slot_table"), nb::arg("slots"), "Fields of resident blocks, an array each.")
      .def("counts",
           [](const BlockTable& table) {
             const TableCounts counts = table.counts();
             nb::dict result;
             result["resident"] = counts.resident;
             result["writing"] = counts.writing;
             result["free"] = counts.free;
             result["removed"] = counts.removed;
             result["pinned"] = counts.pinned;
             return result;
           })
      .def_prop_ro("memory_bytes", &BlockTable::memory_bytes)
      .def_prop_ro("slots", &BlockTable::slots);
}

}  // namespace tutti::bindings
