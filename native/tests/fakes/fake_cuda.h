// How tests command the recording libcuda. Same calls from C++ (dlsym) and Python (ctypes).
#pragma once

extern "C" {
// As new: one device of 132 SMs, least part 8, step 8, compute capability 9, driver 13.0.
void fake_cuda_reset();
void fake_cuda_device(int devices, unsigned sms, unsigned least, unsigned alignment, int major, int version);
// Lets the `call`-th call (from 1) of a function fail with `result`; once.
void fake_cuda_fail(const char* function, int call, int result);
// Takes a function out of the driver.
void fake_cuda_without(const char* function);
// Calls so far, one `name(arguments)` per line.
const char* fake_cuda_log();
// Streams, green contexts, retains and pushed contexts that exist. 0 = all was given back.
int fake_cuda_alive();
}
