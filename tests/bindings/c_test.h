// Checks for tests in C.
#ifndef C_TEST_H
#define C_TEST_H

#include <sluice.h>
#include <stdbool.h>

// Ends the test with the place unless it holds.
#define CHECK(holds) check((holds), #holds, __FILE__, __LINE__)
// The same unless a call returns this code with a message of one line.
#define EXPECT(code, called) expect((code), (called), #called, __FILE__, __LINE__)
#define EXPECT_OK(called) EXPECT(SLUICE_OK, called)

void check(bool holds, const char* what, const char* file, int line);
void expect(sluice_code code, sluice_code got, const char* what, const char* file, int line);
// malloc that does not fail.
void* memory_for(size_t count, size_t size);

void test_kv_cache(void);
void test_kv_misuse(void);

#endif
