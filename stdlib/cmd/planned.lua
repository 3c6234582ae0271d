-- What plan and explain share: the script's job and a plan of it for each rank, without running anything.
local cli = require "dtrain.cli"
local core = require "dtrain.core"
local engines = require "dtrain.engine"
local jobs = require "dtrain.job"
local load_script = require "dtrain.cmd.script"
local util = require "dtrain.util"

local M = {}

--- The job that the script returns.
function M.job(words)
  cli.capture = true
  local job, path = load_script(words)
  cli.capture = false
  if not jobs.is(job) then
    error(("%s: dtrain %s needs a script that returns dt.job { ... } or makes an engine of one, it returned %s"):format(path,
      cli.verb, util.show(job)), 0)
  end
  core.ctx { threads = cli.given.threads or 0, seed = cli.given.seed or job.seed }
  core.device(cli.given.device or job.device)
  return job, cli.given.ranks or core.size()
end

--- The plans of one rank among `ranks` (engine.plans).
function M.plans(job, ranks, rank, traced)
  local where, n = job:where_is(rank, ranks), job.data.train:count()
  if where.replicas > n then
    util.fail_at(job.where, "%d ranks share %d samples; plan for at most %d ranks", where.replicas, n, n)
  end
  return engines.plans(job, where, traced)
end

--- What the strategies' placements cost besides what they say, as lines: divided values that are gathered because no placement rule
--- has a use for them.
function M.warnings(plan)
  return util.map(plan:gathered(), function(x)
    return ("warning: %s%s has no placement rule for an input that is divided over %q by dim %d: %s bytes are gathered in each "
      .. "microbatch; a strategy's verb rule can give it one, or place says where the input shall lie"):format(x.op,
      x.line and " (" .. x.line .. ")" or "", x.axis, x.dim, util.commas(x.bytes))
  end)
end

--- Microbatches of a full step for a rank at `where` (job:where_is), of so many samples each: by default as the job says.
function M.micros(job, where, rows)
  local loader = core.loader(job.data.train.core, { global = job.batch.global, micro = rows or job:rows(where.replicas), seed = 0,
    rank = where.data, size = where.replicas })
  return loader:micros()[1]
end

return M
