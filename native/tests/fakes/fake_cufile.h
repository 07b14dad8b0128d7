// How tests command the recording libcufile. Same calls from C++ (dlsym) and Python (ctypes).
#pragma once

#include <stdint.h>

extern "C" {
// What becomes of one entry.
enum FakeEntryFate {
  kFakeShort = 1,    // moves `value` bytes, COMPLETE
  kFakeResult = 2,   // moves nothing, FAILED with result `value`
  kFakeStatus = 3,   // moves nothing, ends with event status `value`
  kFakeHang = 4,     // ends as CANCELED, on cancel only
  kFakeStuck = 5,    // ends not even then, but when fake_cufile_release() is called: its bytes move at that time
  kFakeTwice = 6,    // works, and is told twice
  kFakePending = 7,  // is told as pending first, then works
  kFakeTooMuch = 8,  // COMPLETE with more bytes than asked for
};

// As new; the environment's FAKE_CUFILE_FAIL ("cuFileDriverOpen=5033,...") still holds. Its number -1 ends the process,
// -2 never returns.
void fake_cufile_reset();
// Lets the `call`-th call (from 1) of a function fail with this error; once.
void fake_cufile_fail(const char* function, int call, int code);
// The fate of the n-th entry (from 1) that is submitted.
void fake_cufile_entry(int nth, int fate, int64_t value);
void fake_cufile_release();
// Events that one call gives at most, and the entries of a batch that the properties tell.
void fake_cufile_limits(unsigned events_per_call, unsigned batch_entries);
// Calls so far, one `name(arguments)` per line; cuFileBatchIOGetStatus is left out, since its number depends on time.
const char* fake_cufile_log();
// Open driver, file handles, buffers and batches that exist. 0 = all was given back.
int fake_cufile_alive();
// Uses that the real library doesn't allow, one per line.
const char* fake_cufile_violations();
}
