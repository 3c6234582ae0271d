-- Placements: each operation with its inputs divided in each way over two and three ranks, and over two axes of two, gives
-- the values and the gradients of one process. The cases are tests/dist/place_cases.lua; here some ways of each, all of
-- them with DT_ALL=1 (make test-all).
local dt = require "dtrain"
local cases = require "tests.dist.place_cases"
local compare = require "dtrain.compare"
local support = require "support"

local most = os.getenv "DT_ALL" and 1000000 or nil

-- NAME.safetensors -> run, NAME.error -> message.
local function results(ranks, ways)
  local dir = support.folder()
  local code, text = support.run(("tests/dist/place.lua --quiet --dir %s --most %d"):format(dir, most or ways or 1),
    { ranks = ranks, seconds = most and 3600 or 300 })
  assert.are.equal(0, code, text)
  local out = {}
  for file in support.list(dir):gmatch "%./([^\n]+)" do
    local name, kind = file:match "^(.*)%.(%a+)$"
    local path = dir .. "/" .. file
    out[name] = kind == "error" and support.read(path) or dt.load(path)
  end
  return out
end

describe("divided over", function()
  local one
  setup(function() one = results() end)
  for _, at in ipairs { { 2, 5 }, { 3, 3 }, { 4, 6 } } do
    local runs
    for _, c in ipairs(cases.list) do
      it(("%d ranks, %s equals one process"):format(at[1], c.name), function()
        runs = runs or results(table.unpack(at))
        local want, names, n = one[c.name], {}, 0
        assert.are_not.equal("string", type(want), want)
        for key in dt.sorted(want) do names[#names + 1] = key:match "^0 (.+)$" end
        for title, run in dt.sorted(runs) do
          if title:match "^(.-);" == c.name then
            n = n + 1
            assert.are_not.equal("string", type(run), title .. ": " .. tostring(run))
            local text = compare.runs(run, want, names, "f32")
            assert(not text, title .. ": " .. tostring(text))
          end
        end
        assert.is_true(n > 0)
      end)
    end
  end
end)

describe("inputs that are divided by their samples", function()
  -- How often each sample was asked for in a step, and by how many ranks.
  local function asked(ranks, words)
    local code, text = support.run("tests/dist/rows.lua --loop " .. words, { ranks = ranks })
    assert(code == 0, text)
    local times, n = {}, {}
    for rank, list in text:gmatch "rank (%d+): ([%d ]*)%." do
      for i in list:gmatch "%d+" do
        times[i], n[rank] = (times[i] or 0) + 1, (n[rank] or 0) + 1
      end
    end
    return times, n
  end
  for _, c in ipairs { { 2, "", 1, 12 }, { 4, "", 1, 6 }, { 4, "--rows 4", 1, 6 }, { 2, "--targets=false", 1, 12 } } do
    it(("are loaded %d times in all by %d ranks, %s"):format(c[3], c[1], c[2]), function()
      local times, n = asked(c[1], c[2])
      for i = 0, 23 do assert.are.equal(c[3], times[tostring(i)], "sample " .. i) end
      for rank = 0, c[1] - 1 do assert.are.equal(c[4], n[tostring(rank)], "rank " .. rank) end
    end)
  end
  for _, rows in ipairs { 2, 4 } do
    it(("equal one process, and take 1/%d of the memory"):format(rows), function()
      local code, text = support.run(("check tests/dist/rows.lua --ranks %d --rows %d"):format(rows, rows))
      assert.are.equal(0, code, text)
      local function planned(n)
        local done, out = support.run(("plan tests/dist/rows.lua --ranks %d --rows %d --width 1024"):format(n, n))
        assert(done == 0, out)
        return tonumber((out:match "\ninputs and buffers +([%d,]+)":gsub(",", "")))
      end
      assert.are.equal((12 - 12 // rows) * (1024 + 16) * 4, planned(1) - planned(rows))
    end)
  end
end)
