// A library that is no scorer's.
extern "C" int sluice_other() { return 0; }
