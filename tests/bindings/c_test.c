#include "c_test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void check(bool holds, const char* what, const char* file, int line) {
  if (holds) return;
  fprintf(stderr, "%s:%d: not so: %s (message: %s)\n", file, line, what, sluice_message());
  exit(1);
}

void expect(sluice_code code, sluice_code got, const char* what, const char* file, int line) {
  const char* message = sluice_message();
  const bool has_line = code == SLUICE_OK || (message[0] != '\0' && strchr(message, '\n') == NULL);
  if (got == code && has_line) return;
  fprintf(stderr, "%s:%d: %s gave %s instead of %s: %s\n", file, line, what, sluice_code_name(got),
          sluice_code_name(code), message);
  exit(1);
}

void* memory_for(size_t count, size_t size) {
  void* memory = calloc(count > 0 ? count : 1, size);
  if (memory == NULL) abort();
  return memory;
}
