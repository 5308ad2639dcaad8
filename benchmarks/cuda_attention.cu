// cuda_attention check [few]: attention of the CUDA backend against its definition. cuda_attention time [BATCH CONTEXT]: how long
// it takes, in all shapes or in one.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cuda_attention.h"

int main(int count, char** arguments) try {
  const bool check = count > 1 && std::strcmp(arguments[1], "check") == 0;
  if (check) return maga::cuda::check_attention(count > 2 && std::strcmp(arguments[2], "few") == 0) == 0 ? 0 : 1;
  if (count > 1 && std::strcmp(arguments[1], "time") == 0) {
    const auto number = [&](int i) { return count == 4 ? std::atoi(arguments[i]) : 0; };
    return maga::cuda::time_attention(number(2), number(3)), 0;
  }
  std::fprintf(stderr, "usage: cuda_attention check [few] | time [BATCH CONTEXT]\n");
  return 2;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
