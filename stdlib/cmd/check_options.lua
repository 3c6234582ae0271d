-- What `dtrain check` understands beside dtrain's own options.
return {
  { "ranks", "count", "ranks to compare with one process (default: 2)" },
  { "all", "boolean", "every strategy that fits these ranks, instead of the script's" },
  { "into", "string", "run one side here and write its numbers to this file" },
}
