-- What `dtrain check` understands beside dtrain's own options.
return {
  { "ranks", "count", "ranks to compare with one process (default: 2)" },
  { "all", "boolean", "every strategy that fits these ranks, instead of the script's" },
  { "reference", "string", "compare with this script on as many ranks, instead of one process" },
  { "launch", "string", "what starts the ranks (default: mpirun on this host), as 'mpirun --host a:2,b:2'; -n N is added" },
  { "into", "string", "run one side here and write its numbers to this file" },
}
