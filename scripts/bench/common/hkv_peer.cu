// HierarchicalKV's own benchmark, for one table: its program measures eighty, which takes an hour.
// hkv_peer.py builds it beside that program's source, and reads what it prints.
#define main hkv_main
#include "merlin_hashtable_benchmark.cc.cu"
#undef main

#include <map>

// dim, slots, GiB of GPU memory for rows, keys of a call, load factors by commas, operations
int main(int argc, char** argv) {
  if (argc < 7) return 2;
  const std::map<std::string, API_Select> known{
      {"insert_or_assign", API_Select::insert_or_assign},
      {"find", API_Select::find},
      {"find_or_insert", API_Select::find_or_insert},
      {"assign", API_Select::assign},
      {"find*", API_Select::find_ptr},
      {"find_or_insert*", API_Select::find_or_insert_ptr},
      {"insert_and_evict", API_Select::insert_and_evict},
      {"export_batch", API_Select::export_batch},
      {"export_batch_if", API_Select::export_batch_if},
      {"contains", API_Select::contains},
  };
  std::vector<float> loads;
  std::stringstream text(argv[5]);
  for (std::string one; std::getline(text, one, ',');) loads.push_back(std::stof(one));
  std::vector<API_Select> operations;
  for (int i = 6; i < argc; ++i) operations.push_back(known.at(argv[i]));
  test_main(operations, std::stoul(argv[1]), std::stoul(argv[2]), std::stoul(argv[4]),
            std::stoul(argv[3]), 1.0f, false, loads);
  return 0;
}
