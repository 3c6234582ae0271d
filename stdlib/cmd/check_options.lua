-- What `dtrain check` understands beside dtrain's own options.
return {
  { "ranks", "count", "ranks to compare with one process (default: 2)" },
  { "all", "boolean", "every strategy that fits these ranks, instead of the script's" },
  { "reference", "string", "compare with this script on as many ranks, instead of one process" },
  { "into", "string", "run one side here and write its numbers to this file" },
}
