-- Every strategy equals one process: losses, every gradient and every value of a small GPT and a small MLP, for a pairwise covering
-- set of the choices below, for all of them (DT_ALL=1: make test-all), or a sample (DT_ALL=0.05).
local dt = require "dtrain"
local compare = require "dtrain.compare"
local cover = require "dtrain.cover"
local strategies = require "dtrain.strategy"
local support = require "support"

-- What is combined: name, values, and the key of `parallel` that must be there (else only the first value is used).
local factors = {
  { "model", { "gpt", "mlp" } },
  { "data", { 1, 2, 3 } },
  { "zero", { 0, 1, 2, 3 }, "zero" },
  { "tensor", { 1, 2, 3 }, "tensor" },
  { "sequence", { false, true }, "sequence" },
  { "pipeline", { "1", "2 gpipe", "2 1f1b", "2 interleaved", "2 zb_h1", "4 gpipe", "4 1f1b", "4 zb_h1" }, "pipeline" },
  { "precision", { "f32", "bf16" } },
  { "accumulation", { 1, 3 } },
  { "recompute", { "none", "full" }, "recompute" },
  { "tied", { true, false } },
  { "clip", { false, true } },
}
local most_ranks = 8

compare.later.f32 = compare.allowed.f32 -- no step of these jobs makes rounding larger

local known = {}
for _, s in ipairs(strategies.new({}).list) do
  for _, row in ipairs(s.options or {}) do known[row[1]] = true end
end
for _, f in ipairs(factors) do
  if f[3] and not known[f[3]] then f[2] = { f[2][1] } end
end

local function stages(r) return tonumber(r.pipeline and r.pipeline:match "%d+" or 1) end
local function ranks_of(r) return (r.data or 1) * (r.tensor or 1) * stages(r) end

-- May these choices stand together? nil: not chosen yet.
local function valid(r)
  if ranks_of(r) > most_ranks then return false end
  if r.model == "mlp" and (r.tied or r.sequence) then return false end
  if r.sequence and r.tensor == 1 then return false end
  if r.data == 1 and (r.zero or 0) > 0 then return false end
  return true
end

local function product()
  local rows = {}
  local function choose(i, r)
    if i > #factors then
      local copy = {}
      for _, f in ipairs(factors) do copy[f[1]] = r[f[1]] end
      rows[#rows + 1] = copy
      return
    end
    for _, v in ipairs(factors[i][2]) do
      r[factors[i][1]] = v
      if valid(r) then choose(i + 1, r) end
    end
    r[factors[i][1]] = nil
  end
  choose(1, {})
  return rows
end

-- ---- running them: many that want as many ranks in one start of these ranks ----
local most_cases = 60 -- in one start
local dir = support.folder()

-- The words of `parallel` for a row.
local function parallel_of(r)
  local out = { "data=" .. r.data }
  local function add(key, v) if known[key] then out[#out + 1] = key .. "=" .. tostring(v) end end
  add("zero", r.zero)
  add("tensor", r.tensor)
  add("sequence", r.sequence)
  add("pipeline", stages(r))
  local schedule = r.pipeline:match "%d+ (%S+)"
  if schedule then add("schedule", schedule) end
  add("recompute", r.recompute)
  -- interleaved stages want a number of microbatches that the stages divide, also in an epoch's last step of half the batch
  local micros = schedule == "interleaved" and 4 or r.accumulation
  return table.concat(out, ","), -(-24 // (r.data * micros))
end

local function write_list(path, list)
  local lines = { "return {" }
  for _, c in ipairs(list) do
    lines[#lines + 1] = ("{ id = %q, model = %q, tied = %s, clip = %s, micro = %d, precision = %q, parallel = %q },"):format(c.id,
      c.model, c.tied, c.clip and 0.1 or 0.0, c.micro, c.precision, c.parallel)
  end
  lines[#lines + 1] = "}"
  support.write(path, table.concat(lines, "\n"))
end

local function start(list, ranks)
  write_list(dir .. "/list.lua", list)
  local _, text = support.run(("tests/dist/strategy.lua --threads 1 --quiet --list %s/list.lua"):format(dir),
    { ranks = ranks > 1 and ranks, seconds = 60 + 20 * #list })
  return text
end

-- The run of a case; one that its group lost to another's end is started alone.
local function result(c)
  local path = ("%s/%s"):format(dir, c.id)
  local function look()
    local message = support.read(path .. ".error")
    assert(not message, message)
    return support.read(path .. ".safetensors") and dt.load(path .. ".safetensors")
  end
  if not c.group.started then
    c.group.started = true
    start(c.group, c.ranks)
  end
  local run = look()
  if not run then
    local said = start({ c }, c.ranks)
    run = assert(look(), "it ended without a result:\n" .. said)
  end
  os.remove(path .. ".safetensors") -- mapped: it lives as long as its tensors
  return run
end

local function title(r)
  local out = {}
  for _, f in ipairs(factors) do
    if #f[2] > 1 then out[#out + 1] = f[1] .. " " .. tostring(r[f[1]]) end
  end
  return table.concat(out, ", ")
end

local all = os.getenv "DT_ALL"
local rows = all and product() or cover(factors, valid)
if all and tonumber(all) and tonumber(all) < 1 then -- each with this probability, by a fixed seed
  local kept, state = {}, 12345
  for _, r in ipairs(rows) do
    state = (state * 1103515245 + 12345) % 2147483648
    if state / 2147483648 < tonumber(all) then kept[#kept + 1] = r end
  end
  rows = kept
end
local groups, references = {}, {} -- the list that a case of so many ranks joins; cases of one process by name
local function case(c)
  local group = groups[c.ranks]
  if not group or #group == most_cases then
    group = {}
    groups[c.ranks] = group
  end
  group[#group + 1] = c
  c.group = group
  return c
end

local function reference(r)
  local id = ("%s_%s_%s_%s"):format(r.model, r.precision, r.tied and "tied" or "untied", r.clip and "clip" or "free")
  references[id] = references[id] or case { id = id, model = r.model, tied = r.tied, clip = r.clip, micro = 24,
    precision = r.precision, parallel = "none", ranks = 1 }
  return references[id]
end

describe(all and "each combination equals one process:" or "a covering set equals one process:", function()
  for i, r in ipairs(rows) do
    local parallel, micro = parallel_of(r)
    local one, several = reference(r), case { id = ("case%d"):format(i), model = r.model, tied = r.tied, clip = r.clip,
      micro = micro, precision = r.precision, parallel = parallel, ranks = ranks_of(r) }
    it(title(r), function()
      one.run = one.run or result(one)
      local names = {}
      for key in dt.sorted(one.run) do names[#names + 1] = key:match "^0 (.+)$" end
      local text = compare.runs(result(several), one.run, names, r.precision)
      assert(not text, text)
    end)
  end
end)

describe("the covering set", function()
  it("has each pair of choices that any combination has", function()
    local missing, have, may = {}, {}, {}
    local function pairs_of(list, into)
      for _, r in ipairs(list) do
        for i = 1, #factors do
          for j = i + 1, #factors do
            into[("%s=%s %s=%s"):format(factors[i][1], r[factors[i][1]], factors[j][1], r[factors[j][1]])] = true
          end
        end
      end
    end
    pairs_of(cover(factors, valid), have)
    pairs_of(product(), may)
    for pair in dt.sorted(may) do if not have[pair] then missing[#missing + 1] = pair end end
    assert.are.equal("", table.concat(missing, "\n"))
  end)
end)
